"""What is looked at again while training, and the face that the user's module wears."""
