package filepool

import (
	"errors"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"

	"github.com/ashlar-csi/ashlar/pkg/blockdev/filepool/internal/directory"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/options"
)

// Location is where a file pool is, and how it is kept. As a URL:
//
//	file:///var/lib/ashlar?overprovision=1.5&reservePercent=5
type Location struct {
	Path string // absolute and clean
	// Overprovision is how many bytes may be promised for each byte that is there.
	Overprovision float64
	// ReservePercent of the storage is never promised; ReserveAuto until the pool is opened: see Reserve.
	ReservePercent float64
	// Create says whether a directory without a pool becomes one: directory.Never, Always or Auto.
	Create float64
}

// ReserveAuto: the reserve depends on whose filesystem it is.
const ReserveAuto = -1

// CreateAuto is how Location.Create is if the URL does not say it.
const CreateAuto = directory.Auto

// Parse parses the URL of a file pool. The error says what is wrong with it.
func Parse(u *url.URL) (Location, error) {
	if u.Host != "" || u.User != nil || u.Opaque != "" || u.Fragment != "" {
		return Location{}, errors.New("write it as file:///DIRECTORY, with three slashes")
	}
	if !filepath.IsAbs(u.Path) || filepath.Clean(u.Path) != strings.TrimSuffix(u.Path, "/") || strings.ContainsRune(u.Path, 0) {
		return Location{}, fmt.Errorf("%q is not an absolute, clean path below /", u.Path)
	}
	l := Location{Path: filepath.Clean(u.Path), Overprovision: 1, ReservePercent: ReserveAuto, Create: CreateAuto}
	return l, options.Read(u, l.options()...)
}

// options are those of the URL, with where their values go.
func (l *Location) options() []options.Option {
	return []options.Option{
		options.Overprovision(&l.Overprovision),
		options.ReservePercent(&l.ReservePercent, "5 on a filesystem that the pool has for itself, 20 on one that others write to"),
		{Name: "create", From: 0, To: 1, Whole: true, Value: &l.Create,
			Means:   "1: any directory may become the pool; 0: none. An empty directory may be that of a disk which is not mounted",
			Default: "a directory that is not there yet, and the root of an empty filesystem, become the pool"},
	}
}

// Forms are how the URLs of file pools are written.
func Forms() []options.Form {
	return []options.Form{{URL: "file:///DIRECTORY", Options: (&Location{}).options(),
		Means: "files: thick or thin. On XFS or btrfs, snapshots and clones take milliseconds; on ext4 they are copies"}}
}

// Scheme is that of the URLs of file pools.
func (Location) Scheme() string { return "file" }

func (l Location) place() directory.Place { return directory.Place{Path: l.Path, Create: l.Create} }
