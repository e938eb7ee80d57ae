"""What runs beside a command or outlives it: servers, workers, and runs whose process died."""
