package volume

import (
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/luks"
)

// SchemesHere returns the schemes that volumes on this machine can have, with its present kernel and programs.
func SchemesHere() []Scheme {
	if luks.Available() != nil {
		return nil
	}
	return []Scheme{LUKS2}
}

// Capacity returns the capacity of a pool for volumes of a scheme: MaxVolume is less by the scheme's Overhead.
func (s Scheme) Capacity(of blockdev.Capacity) blockdev.Capacity {
	of.MaxVolume = max(0, of.MaxVolume-s.Overhead())
	return of
}
