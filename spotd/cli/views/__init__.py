"""What commands show: tables, charts, pictures and the sentences around them."""
