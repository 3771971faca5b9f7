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

// Location is where a file pool is, and its options. As a URL:
//
//	file:///var/lib/ashlar?overprovision=1.5&reservePercent=5
type Location struct {
	Path string // absolute and clean
	// Overprovision is how many bytes may be promised for each byte that is there.
	Overprovision float64
	// ReservePercent is how much of the filesystem is never promised; ReserveAuto until the pool is opened: see Reserve.
	ReservePercent float64
	// Create says whether a directory without a pool becomes one: directory.Never, Always or Auto.
	Create float64
}

// ReserveAuto is for a reserve that depends on whether the pool has the filesystem for itself.
const ReserveAuto = -1

// CreateAuto is Location.Create if the URL does not say it.
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

// options returns the options of the URL, with the fields that have their values.
func (l *Location) options() []options.Option {
	return []options.Option{
		options.Overprovision(&l.Overprovision),
		options.ReservePercent(&l.ReservePercent, "5 on a filesystem that the pool has for itself, 20 on one that others write to"),
		{Name: "create", From: 0, To: 1, Whole: true, Value: &l.Create,
			Means:   "1: any directory may become the pool; 0: none. An empty directory may be that of a disk which is not mounted",
			Default: "a directory that is not there yet, and the root of an empty filesystem, become the pool"},
	}
}

// Forms returns how the URLs of file pools are written, for people.
func Forms() []options.Form {
	return []options.Form{{URL: "file:///DIRECTORY", Options: (&Location{}).options(),
		Means: "files: thick or thin. On XFS or btrfs, snapshots and clones take milliseconds; on ext4 they are copies"}}
}

// Scheme returns the scheme of the URLs of file pools.
func (Location) Scheme() string { return "file" }

func (l Location) place() directory.Place { return directory.Place{Path: l.Path, Create: l.Create} }
