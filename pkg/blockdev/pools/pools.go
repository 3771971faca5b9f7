// Package pools opens pools of all kinds, by their URLs.
package pools

import (
	"context"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/options"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lazy"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/lvmpool"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// Location is a parsed pool URL. Each kind of pools has a package with its own type.
type Location interface {
	// Scheme returns the scheme of the URL, which is the name of the kind.
	Scheme() string
	// Open opens the pool at the location, and finishes or undoes what a crash left half-done in it. With known, a missing pool is made only if nothing is
	// known of it, whatever the place looks like, and a pool that is not the known one is errdefs.ErrUnavailable. Without known nothing is remembered.
	Open(ctx context.Context, name string, known blockdev.Known) (blockdev.Pool, error)
}

// KindOf returns the name of a kind of pools for people: the scheme, or lvmthin for a thin pool.
func KindOf(l Location) string {
	if lvm, ok := l.(lvmpool.Location); ok && lvm.Thin != "" {
		return "lvmthin"
	}
	return l.Scheme()
}

// kinds has the kinds of pools, by the scheme of their URLs.
var kinds = map[string]kind{
	"file": {filepool.Forms, parser(filepool.Parse)},
	"lvm":  {lvmpool.Forms, parser(lvmpool.Parse)},
}

type kind struct {
	forms func() []options.Form // how its URLs are written, for people
	parse func(*url.URL) (Location, error)
}

// Forms returns how the URLs of all kinds of pools are written, and their options (docs/reference/parameters.md).
func Forms() (all []options.Form) {
	for _, scheme := range slices.Sorted(maps.Keys(kinds)) {
		all = append(all, kinds[scheme].forms()...)
	}
	return all
}

func parser[L Location](parse func(*url.URL) (L, error)) func(*url.URL) (Location, error) {
	return func(u *url.URL) (Location, error) { return parse(u) }
}

// Parse parses a pool URL. errdefs.ErrInvalid unless its kind understands all of it.
func Parse(text string) (Location, error) {
	location, err := parse(text)
	if err != nil {
		return nil, fmt.Errorf("%w: pool URL %q: %w", errdefs.ErrInvalid, text, err)
	}
	return location, nil
}

func parse(text string) (Location, error) {
	u, err := url.Parse(text)
	if err != nil {
		return nil, err
	}
	if kind, known := kinds[u.Scheme]; known {
		return kind.parse(u)
	}
	var known []string
	for _, form := range Forms() {
		known = append(known, form.URL)
	}
	return nil, fmt.Errorf("unknown kind %q; known: %s", u.Scheme, strings.Join(known, ", "))
}

// Open opens the pool at a URL. If there is none, it is made if its location permits that; else errdefs.ErrUnavailable.
func Open(ctx context.Context, name, location string) (blockdev.Pool, error) {
	return open(ctx, name, location, nil)
}

func open(ctx context.Context, name, location string, known blockdev.Known) (blockdev.Pool, error) {
	if !blockdev.ValidPoolName(name) {
		return nil, fmt.Errorf("%w: pool name %q: use 1 to 24 of a-z, 0-9 and -, with no - at either end", errdefs.ErrInvalid, name)
	}
	l, err := Parse(location)
	if err != nil {
		return nil, err
	}
	return l.Open(ctx, name, known)
}

// OpenLazy is Open for a pool that may come later than the driver (lazy.Open). known is nil for a caller that remembers no pools.
func OpenLazy(ctx context.Context, name, location string, known blockdev.Known) (*lazy.Pool, error) {
	return lazy.Open(ctx, name, func(ctx context.Context) (blockdev.Pool, error) { return open(ctx, name, location, known) })
}
