"""SGLang's HiCache on a machine without an accelerator: a baseline."""
