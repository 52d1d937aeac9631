"""What the user's model and code hold in Python: read, copied, compared, put back."""
