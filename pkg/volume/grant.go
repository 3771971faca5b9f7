package volume

// Grant is to whom a volume is given: a node, for one generation of its claim.
type Grant struct {
	Generation int64
	Node       string
}
