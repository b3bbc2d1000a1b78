"""What runs in the user's processes while a model trains."""
