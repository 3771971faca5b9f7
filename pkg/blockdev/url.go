package blockdev

import (
	"context"
	"fmt"
	"math"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
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
	Path   string // of file: absolute and clean; of lvm: GROUP or GROUP/THINPOOL
	// Overprovision is how many bytes may be promised for each byte that is there.
	Overprovision float64
	// ReservePercent of the storage is never promised; ReserveAuto until the pool is opened: see Location.Reserve.
	ReservePercent float64
	// DataWatermark and MetadataWatermark are how much of a thin pool's data and metadata
	// may be in use, in percent, before nothing more is promised.
	DataWatermark, MetadataWatermark float64
	// Create says whether a directory without a pool becomes one.
	Create float64
}

// ReserveAuto: the reserve depends on whose filesystem it is.
const ReserveAuto = -1

// What Location.Create may be.
const (
	// CreateNever: there is a pool, or it is awaited.
	CreateNever = 0
	// CreateAlways: any directory becomes a pool.
	CreateAlways = 1
	// CreateAuto: a directory that is not there is made, the root of an empty filesystem becomes a
	// pool, and nothing else: an empty directory may be the place of a disk that is not mounted.
	CreateAuto = -1
)

// groupPattern is how lvm2 takes the names of groups and volumes (lvm(8), VALID NAMES).
var groupPattern = regexp.MustCompile(`^[a-zA-Z0-9+_.][-a-zA-Z0-9+_.]{0,126}$`)

// option is an option of pool URLs: a number.
type option struct {
	name     string
	from, to float64
	value    func(*Location) *float64
	whole    bool // takes no fractions
}

var (
	overprovision     = option{"overprovision", 1, 100, func(l *Location) *float64 { return &l.Overprovision }, false}
	reservePercent    = option{"reservePercent", 0, 90, func(l *Location) *float64 { return &l.ReservePercent }, false}
	create            = option{"create", 0, 1, func(l *Location) *float64 { return &l.Create }, true}
	dataWatermark     = option{"dataWatermark", 1, 100, func(l *Location) *float64 { return &l.DataWatermark }, false}
	metadataWatermark = option{"metadataWatermark", 1, 100, func(l *Location) *float64 { return &l.MetadataWatermark }, false}
)

// ParseLocation parses a pool URL, for example
//
//	file:///var/lib/ashlar?overprovision=1.5&reservePercent=5
//	lvm://vg0?reservePercent=5
//	lvm://vg0/thinpool?overprovision=2&dataWatermark=80&metadataWatermark=80
//
// and returns errdefs.ErrInvalid for anything that it does not know all of.
func ParseLocation(text string) (Location, error) {
	fail := func(format string, args ...any) (Location, error) {
		return Location{}, fmt.Errorf("%w: pool URL %q: %s", errdefs.ErrInvalid, text, fmt.Sprintf(format, args...))
	}
	u, err := url.Parse(text)
	if err != nil {
		return fail("%v", err)
	}
	loc := Location{Scheme: u.Scheme, Overprovision: 1, DataWatermark: 90, MetadataWatermark: 90}
	options := []option{overprovision, reservePercent, create}
	switch u.Scheme {
	case "file":
		if u.Host != "" || u.User != nil || u.Opaque != "" || u.Fragment != "" {
			return fail("write it as file:///FOLDER, with three slashes")
		}
		if !filepath.IsAbs(u.Path) || filepath.Clean(u.Path) != strings.TrimSuffix(u.Path, "/") || strings.ContainsRune(u.Path, 0) {
			return fail("%q is not an absolute, clean path below /", u.Path)
		}
		loc.Path, loc.ReservePercent, loc.Create = filepath.Clean(u.Path), ReserveAuto, CreateAuto
	case "lvm":
		thin := strings.TrimPrefix(u.Path, "/")
		switch {
		case u.User != nil || u.Opaque != "" || u.Fragment != "" || !groupName(u.Host):
			return fail("write it as lvm://GROUP or lvm://GROUP/THINPOOL")
		case u.Path == "":
			loc.Path, options = u.Host, []option{reservePercent}
		case groupName(thin):
			loc.Path, options = u.Host+"/"+thin, []option{overprovision, reservePercent, dataWatermark, metadataWatermark}
		default:
			return fail("%q is not the name of a thin pool", thin)
		}
	default:
		return fail("unknown kind %q; known: file:///FOLDER, lvm://GROUP and lvm://GROUP/THINPOOL", u.Scheme)
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return fail("%v", err)
	}
	for key, values := range query {
		i := slices.IndexFunc(options, func(o option) bool { return o.name == key })
		if i < 0 {
			return fail("unknown option %q here; known: %s", key, names(options))
		}
		if len(values) != 1 {
			return fail("%s is there %d times", key, len(values))
		}
		o := options[i]
		n, err := strconv.ParseFloat(values[0], 64)
		if err != nil || !(n >= o.from && n <= o.to) {
			return fail("%s=%s is not a number from %g to %g", key, values[0], o.from, o.to)
		}
		if o.whole && n != math.Trunc(n) {
			return fail("%s=%s is not a whole number", key, values[0])
		}
		*o.value(&loc) = n
	}
	return loc, nil
}

func groupName(name string) bool {
	return groupPattern.MatchString(name) && name != "." && name != ".."
}

func names(options []option) string {
	var all []string
	for _, o := range options {
		all = append(all, o.name)
	}
	return strings.Join(all, ", ")
}

// Known tells what the caller remembers of a pool: its identity (Identified); empty if nothing is
// known of it, so that it may be made. An error: that cannot be told now. It is asked each time
// the pool is looked for, and must not wait long.
type Known func(ctx context.Context) (id string, err error)

// Expect makes sure that a pool is the one that is remembered. Who cannot say now does not
// keep a pool that is there from being used.
func Expect(ctx context.Context, known Known, id string) error {
	if known == nil {
		return nil
	}
	if want, err := known(ctx); err == nil && want != "" && want != id {
		return fmt.Errorf("%w: another pool is here, with the identity %q; the one that is missing has %s: is its disk mounted?", errdefs.ErrUnavailable, id, want)
	}
	return nil
}
