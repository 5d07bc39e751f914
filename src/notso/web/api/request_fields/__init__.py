"""Request fields of all APIs: types, notes, validation and errors."""
