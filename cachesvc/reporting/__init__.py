"""What `cachesvc report` says: history of one or several daemons, tables, and a page with charts."""
