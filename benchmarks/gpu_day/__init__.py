"""The evidence of one GPU host, in a borrowed hour: steps in order of value, each bounded, what is
done remembered."""
