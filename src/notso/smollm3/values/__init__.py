"""Value types shared with the layers above. They import only the standard library and the model layer's errors."""
