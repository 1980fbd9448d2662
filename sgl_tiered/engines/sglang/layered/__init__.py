"""Layer-wise KV inside SGLang: some layers on the device, the others in memory."""
