package lvmpool

import (
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/options"
)

// Location is where an LVM pool is, and its options. As a URL:
//
//	lvm://vg0?reservePercent=5
//	lvm://vg0/thinpool?overprovision=2&dataWatermark=80&metadataWatermark=80
type Location struct {
	Group string
	Thin  string // name of the thin pool; empty for linear volumes
	// Overprovision is how many bytes may be promised for each byte that is there.
	Overprovision float64
	// ReservePercent of the storage is never promised.
	ReservePercent float64
	// DataWatermark and MetadataWatermark are how much of a thin pool's data and metadata
	// may be in use, in percent, before nothing more is promised.
	DataWatermark, MetadataWatermark float64
}

// groupPattern matches names of groups and volumes that lvm2 takes (lvm(8), VALID NAMES).
var groupPattern = regexp.MustCompile(`^[a-zA-Z0-9+_.][-a-zA-Z0-9+_.]{0,126}$`)

func groupName(name string) bool {
	return groupPattern.MatchString(name) && name != "." && name != ".."
}

// Parse parses the URL of an LVM pool. The error says what is wrong with it.
func Parse(u *url.URL) (Location, error) {
	if u.User != nil || u.Opaque != "" || u.Fragment != "" || !groupName(u.Host) {
		return Location{}, errors.New("write it as lvm://GROUP or lvm://GROUP/THINPOOL")
	}
	l := Location{Group: u.Host, Overprovision: 1, DataWatermark: 90, MetadataWatermark: 90}
	if u.Path == "" {
		return l, options.Read(u, l.options()...)
	}
	if l.Thin = strings.TrimPrefix(u.Path, "/"); !groupName(l.Thin) {
		return Location{}, fmt.Errorf("%q is not the name of a thin pool", l.Thin)
	}
	return l, options.Read(u, l.thinOptions()...)
}

// options returns the options of the URL of a group, with the fields that have their values.
func (l *Location) options() []options.Option {
	return []options.Option{options.ReservePercent(&l.ReservePercent, "0")}
}

// thinOptions returns the options of the URL of a thin pool.
func (l *Location) thinOptions() []options.Option {
	return append([]options.Option{options.Overprovision(&l.Overprovision)}, append(l.options(),
		options.Option{Name: "dataWatermark", From: 1, To: 100, Value: &l.DataWatermark, Default: "90",
			Means: "percent of the thin pool's data in use, from which on nothing more is promised"},
		options.Option{Name: "metadataWatermark", From: 1, To: 100, Value: &l.MetadataWatermark, Default: "90",
			Means: "percent of its metadata in use, from which on nothing more is promised"})...)
}

// Forms returns how the URLs of LVM pools are written, for people.
func Forms() []options.Form {
	return []options.Form{
		{URL: "lvm://GROUP", Options: (&Location{}).options(),
			Means: "thick logical volumes, zeroed before they are handed out. Snapshots and clones are copies; writers wait only for the moment of the cut"},
		{URL: "lvm://GROUP/THINPOOL", Options: (&Location{}).thinOptions(),
			Means: "thin logical volumes. Snapshots and clones are instant"},
	}
}

// Scheme returns the scheme of the URLs of LVM pools.
func (Location) Scheme() string { return "lvm" }

func (l Location) String() string {
	if l.Thin == "" {
		return "lvm://" + l.Group
	}
	return "lvm://" + l.Group + "/" + l.Thin
}
