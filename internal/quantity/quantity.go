// Package quantity reads numbers as Kubernetes writes them.
package quantity

import (
	"math"
	"strconv"
	"strings"
)

var suffixes = []struct {
	suffix string
	factor int64
}{{"Ki", 1 << 10}, {"Mi", 1 << 20}, {"Gi", 1 << 30}, {"Ti", 1 << 40}, {"k", 1e3}, {"M", 1e6}, {"G", 1e9}, {"T", 1e12}}

// Parse reads a whole number of 1 or more: digits, with one of the suffixes Ki, Mi, Gi, Ti, k, M, G and T or without. It returns 0 for anything else, and for
// numbers larger than an int64.
func Parse(text string) int64 {
	number, factor := text, int64(1)
	for _, s := range suffixes {
		if cut, ok := strings.CutSuffix(text, s.suffix); ok {
			number, factor = cut, s.factor
			break
		}
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n <= 0 || n > math.MaxInt64/factor {
		return 0
	}
	return n * factor
}
