"""Tools that use the library: sizes and recommendations (`plan`), evaluation (`evaluation`), caches described by
strings (`strategy`), plots (`plot`), the command line (`cli`)."""
