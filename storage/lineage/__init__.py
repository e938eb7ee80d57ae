"""What runs read and made: artifacts, the recording of a run, and the walk along both."""
