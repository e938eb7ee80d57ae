"""Where the parts of a stage run: in processes of this machine, or on a cluster of Ray or Dask."""
