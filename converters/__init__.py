"""From other people's checkpoints to ftbert's: name tables and one generic loop."""
