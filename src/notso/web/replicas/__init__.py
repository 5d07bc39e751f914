"""Several servers over one store: what they tell each other, and how a reader of one follows an answer of another."""
