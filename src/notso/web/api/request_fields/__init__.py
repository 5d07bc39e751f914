"""What a request of a program may hold: fields, their kinds and notes, and how they are read and refused."""
