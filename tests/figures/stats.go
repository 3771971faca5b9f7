// Package figures is how the benchmarks show what they measured: medians and spreads, tables of Markdown, and charts.
package figures

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Quantile of some values: one of them; the zero value if there is none.
func Quantile[T cmp.Ordered](values []T, q float64) T {
	var none T
	if len(values) == 0 {
		return none
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// Median of some values.
func Median[T cmp.Ordered](values []T) T { return Quantile(values, 0.5) }

// Table prints Markdown; columns after the first are numbers.
func Table(head []string, rows [][]string) {
	fmt.Printf("\n| %s |\n|---%s|\n", strings.Join(head, " | "), strings.Repeat("|--:", len(head)-1))
	for _, row := range rows {
		fmt.Printf("| %s |\n", strings.Join(row, " | "))
	}
}
