"""Operations of the forward pass that are computed in another way than PyTorch does."""
