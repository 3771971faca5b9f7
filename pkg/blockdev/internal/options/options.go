// Package options reads the options of pool URLs, which are numbers.
package options

import (
	"fmt"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// Option is an option of a pool URL: a number from From to To, without a fraction if Whole.
type Option struct {
	Name     string
	From, To float64
	Whole    bool
	Value    *float64

	Means   string // for people: what the number is
	Default string // and what it is if the URL does not say it
}

// Form is a way to write the URLs of a kind of pools.
type Form struct {
	URL     string
	Means   string // what volumes are there
	Options []Option
}

// Options that all pools that have them share.

// Overprovision returns the option for how many bytes may be promised for each byte that is there.
func Overprovision(value *float64) Option {
	return Option{Name: "overprovision", From: 1, To: 100, Value: value,
		Means: "bytes that may be promised for each byte that is there", Default: "1"}
}

// ReservePercent returns the option for how much of the storage is never promised. byDefault says for people what it is without the option.
func ReservePercent(value *float64, byDefault string) Option {
	return Option{Name: "reservePercent", From: 0, To: 90, Value: value,
		Means: "percent of the storage that is never promised", Default: byDefault}
}

// Read sets the values of the options that a URL has; others keep theirs. The error says what is wrong with the URL.
func Read(u *url.URL, known ...Option) error {
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return err
	}
	for key, values := range query {
		i := slices.IndexFunc(known, func(o Option) bool { return o.Name == key })
		if i < 0 {
			var names []string
			for _, o := range known {
				names = append(names, o.Name)
			}
			return fmt.Errorf("unknown option %q here; known: %s", key, strings.Join(names, ", "))
		}
		if len(values) != 1 {
			return fmt.Errorf("%s is there %d times", key, len(values))
		}
		o := known[i]
		n, err := strconv.ParseFloat(values[0], 64)
		if err != nil || !(n >= o.From && n <= o.To) {
			return fmt.Errorf("%s=%s is not a number from %g to %g", key, values[0], o.From, o.To)
		}
		if o.Whole && n != math.Trunc(n) {
			return fmt.Errorf("%s=%s is not a whole number", key, values[0])
		}
		*o.Value = n
	}
	return nil
}
