package volume_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// FuzzParseID: IDs come from outside. A text that parses is what String returns for the ID, and cannot be a path.
func FuzzParseID(f *testing.F) {
	key := volume.KeyOf("pvc-1")
	for _, seed := range []string{
		"vol.default." + key, "snap.a." + key, "group." + key, "", ".", "..", "vol..", "vol." + key, "vol.default." + key + ".x",
		"vol.default." + strings.ToUpper(key), "vol.default." + key[1:], "vol.-a." + key, "vol." + strings.Repeat("a", 25) + "." + key,
		"VOL.default." + key, "vol.default.../../../../../../etc/passwd", "vol./etc." + key, "vol.default." + key + "\n", " vol.default." + key,
		"vol.default." + key[:31] + "\x00", "group." + key + "a", "group..", "pvc-1",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		id, err := volume.ParseID(text)
		group, groupErr := volume.ParseGroupID(text)
		for _, err := range []error{err, groupErr} {
			if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
				t.Fatalf("%q: error %v is not %v", text, err, errdefs.ErrNotFound)
			}
		}
		if err == nil && groupErr == nil {
			t.Fatalf("%q is both %s and %s", text, id, group)
		}
		if (err == nil && id.String() != text) || (groupErr == nil && group.String() != text) {
			t.Fatalf("%q parses as %s, %s", text, id, group)
		}
		if (err == nil || groupErr == nil) && (strings.ContainsAny(text, "/\\\x00\n ") || strings.Contains(text, "..") || len(text) > 63) {
			t.Fatalf("%q is an ID", text)
		}
		if err != nil && id != (volume.ID{}) || groupErr != nil && group != (volume.GroupID{}) {
			t.Fatalf("%q: an ID with an error: %s, %s", text, id, group)
		}
	})
}
