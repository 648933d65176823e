"""Any agent command behind a gateway of its own, with its calls kept in a folder and no broker."""
