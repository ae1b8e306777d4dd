"""Parts with which models see: they open images (`open`), process them (`processors`), make features (`towers`)."""
