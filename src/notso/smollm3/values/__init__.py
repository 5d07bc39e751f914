"""Define value types that the layers above also use. They depend only on the standard library and
`notso.smollm3.errors`."""
