"""Define value types that the layers above also use. They import only the standard library, `notso.smollm3.errors` and
`notso.text_file`."""
