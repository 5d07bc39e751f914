"""Value types shared with the layers above. They import only the standard library and `notso.smollm3.errors`."""
