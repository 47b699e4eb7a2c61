"""Other engines as hosts of specdec's drafts. A subpackage belongs to one host and is imported only where that runs."""
