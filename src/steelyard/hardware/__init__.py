"""What it runs on: devices, links and clusters; every number with its source."""
