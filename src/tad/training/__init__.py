"""What the student learns: objectives, data, one trainer. Pretraining a base model is its first use."""
