"""The code that runs in the user's processes while a model trains."""
