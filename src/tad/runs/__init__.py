"""What every run leaves and goes by: its record, the fingerprints and seeds it depends on, and whether it is the same run."""
