"""What modules become when they are sharded, synchronised or made layout-independent."""
