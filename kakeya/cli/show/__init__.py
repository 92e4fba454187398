"""What commands print for people: pictures of a node and its fleet, in a terminal of any size."""
