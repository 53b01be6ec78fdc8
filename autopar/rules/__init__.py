"""The rules by which a mesh axis may split an op: their notation, the table, and what follows at each node."""
