"""What uses the library, and is not used by it: sizes and recommendations (`plan`), measurements (`evaluation`), caches
named by a text (`strategy`), pictures (`plot`), the command line (`cli`)."""
