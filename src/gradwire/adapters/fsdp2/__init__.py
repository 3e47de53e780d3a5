"""FSDP2: models given to `fully_shard`, whose gradients are reduce-scattered and whose parameters are gathered."""
