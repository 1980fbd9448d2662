"""LSPDojo, the Berkeley report's tree search over code: see README.md."""
