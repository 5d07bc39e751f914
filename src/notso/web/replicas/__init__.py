"""Several servers over one database: messages between them, and answers followed across replicas."""
