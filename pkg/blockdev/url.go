package blockdev

import (
	"context"
	"fmt"
	"net/url"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// A pool's name is part of volume IDs and, with them, of loop device labels, which
// the kernel limits to 63 bytes.
var poolNamePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,22}[a-z0-9])?$`)

// ValidPoolName reports whether name is 1 to 24 lower-case letters, digits and
// dashes, with no dash at either end.
func ValidPoolName(name string) bool { return poolNamePattern.MatchString(name) }

// Location is a parsed pool URL.
type Location struct {
	Scheme string
	Path   string // absolute and clean
	// Overprovision is how many bytes may be promised for each byte that is there.
	Overprovision float64
	// ReservePercent of the storage is never promised.
	ReservePercent float64
}

// ParseLocation parses a pool URL, for example
//
//	file:///var/lib/ashlar?overprovision=1.5&reservePercent=5
//
// and returns ErrInvalid for anything that it does not know all of.
func ParseLocation(text string) (Location, error) {
	fail := func(format string, args ...any) (Location, error) {
		return Location{}, fmt.Errorf("%w: pool URL %q: %s", ErrInvalid, text, fmt.Sprintf(format, args...))
	}
	u, err := url.Parse(text)
	if err != nil {
		return fail("%v", err)
	}
	if u.Scheme != "file" {
		return fail("unknown kind %q; known: file:///FOLDER", u.Scheme)
	}
	if u.Host != "" || u.User != nil || u.Opaque != "" || u.Fragment != "" {
		return fail("write it as %s:///FOLDER, with three slashes", u.Scheme)
	}
	if !filepath.IsAbs(u.Path) || filepath.Clean(u.Path) != strings.TrimSuffix(u.Path, "/") || strings.ContainsRune(u.Path, 0) {
		return fail("%q is not an absolute, clean path below /", u.Path)
	}
	loc := Location{Scheme: u.Scheme, Path: filepath.Clean(u.Path), Overprovision: 1, ReservePercent: 5}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return fail("%v", err)
	}
	for key, values := range query {
		if len(values) != 1 {
			return fail("%s is there %d times", key, len(values))
		}
		n, err := strconv.ParseFloat(values[0], 64)
		switch key {
		case "overprovision":
			if err != nil || !(n >= 1 && n <= 100) {
				return fail("overprovision=%s is not a number from 1 to 100", values[0])
			}
			loc.Overprovision = n
		case "reservePercent":
			if err != nil || !(n >= 0 && n <= 90) {
				return fail("reservePercent=%s is not a number from 0 to 90", values[0])
			}
			loc.ReservePercent = n
		default:
			return fail("unknown option %q; known: overprovision, reservePercent", key)
		}
	}
	return loc, nil
}

// Open opens the pool at a URL, makes its folder if there is none, and finishes or
// undoes what a crash left half-done in it.
func Open(ctx context.Context, name, location string) (Pool, error) {
	if !ValidPoolName(name) {
		return nil, fmt.Errorf("%w: pool name %q: use 1 to 24 of a-z, 0-9 and -, with no - at either end", ErrInvalid, name)
	}
	loc, err := ParseLocation(location)
	if err != nil {
		return nil, err
	}
	return openFilePool(ctx, name, loc)
}
