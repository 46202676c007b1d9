"""What an optimizer step launches: Muon, symmetric products, flat sums of gradients."""
