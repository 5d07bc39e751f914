"""What programs may ask about the server itself."""
