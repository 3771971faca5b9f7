package csimap

import (
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

func block(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
}

func mounted(mode csi.VolumeCapability_AccessMode_Mode, fs string) *csi.VolumeCapability {
	return &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fs}}}
}

const (
	writer = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	reader = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
)

func TestCheckCapabilities(t *testing.T) {
	type list = []*csi.VolumeCapability
	withGroup := mounted(writer, "")
	withGroup.GetMount().VolumeMountGroup = "1000"
	withFlags := func(flags ...string) *csi.VolumeCapability {
		c := mounted(writer, "")
		c.GetMount().MountFlags = flags
		return c
	}
	for name, c := range map[string]struct {
		capabilities list
		fs           filesystem.Type
		refused      bool
	}{
		"none":              {nil, "", true},
		"nil":               {list{nil}, "", true},
		"empty":             {list{{}}, "", true},
		"no mode":           {list{{AccessType: block(writer).AccessType}}, "", true},
		"no type":           {list{{AccessMode: block(writer).AccessMode}}, "", true},
		"block":             {list{block(writer)}, "", false},
		"default":           {list{mounted(writer, "")}, filesystem.Ext4, false},
		"ext4":              {list{mounted(writer, "ext4")}, filesystem.Ext4, false},
		"xfs":               {list{mounted(writer, "xfs")}, filesystem.XFS, false},
		"btrfs":             {list{mounted(writer, "btrfs")}, filesystem.Btrfs, false},
		"ntfs":              {list{mounted(writer, "ntfs")}, "", true},
		"upper case":        {list{mounted(writer, "XFS")}, "", true},
		"both, block first": {list{block(writer), mounted(reader, "xfs")}, filesystem.XFS, false},
		"both, mount first": {list{mounted(reader, "xfs"), block(writer)}, filesystem.XFS, false},
		"they agree":        {list{mounted(writer, ""), mounted(reader, "ext4")}, filesystem.Ext4, false},
		"they differ":       {list{mounted(writer, ""), mounted(reader, "xfs")}, "", true},
		"the second is bad": {list{block(writer), nil}, "", true},
		"deadly":            {list{withFlags("noatime,errors=panic")}, "", true},
		"another device":    {list{withFlags("noatime", "journal_dev=0x700")}, "", true},
		"flags":             {list{withFlags("noatime,errors=continue")}, filesystem.Ext4, false},
		"group of files":    {list{withGroup}, "", true},
	} {
		t.Run(name, func(t *testing.T) {
			fs, err := CheckCapabilities(c.capabilities...)
			if fs != c.fs || errors.Is(err, errdefs.ErrInvalid) != c.refused || (err != nil) != c.refused {
				t.Errorf("%q, %v; want %q, refused %v", fs, err, c.fs, c.refused)
			}
		})
	}
}

// TestModes: of all the modes that CSI has, those on one node can be had, and readers.
func TestModes(t *testing.T) {
	for number, name := range csi.VolumeCapability_AccessMode_Mode_name {
		mode := csi.VolumeCapability_AccessMode_Mode(number)
		for _, capability := range []*csi.VolumeCapability{block(mode), mounted(mode, "")} {
			_, err := CheckCapabilities(capability)
			if want := strings.HasPrefix(name, "SINGLE_NODE_") || name == "MULTI_NODE_READER_ONLY"; (err == nil) != want {
				t.Errorf("%s: %v, want it served: %v", name, err, want)
			}
			if have, want := ReadOnly(capability), strings.HasSuffix(name, "_READER_ONLY"); have != want {
				t.Errorf("%s: read-only %v, want %v", name, have, want)
			}
		}
		if b, m := ModeOf(block(mode)), ModeOf(mounted(mode, "xfs")); b != "block,"+name || m != "mount,"+name {
			t.Errorf("%s: modes %q and %q", name, b, m)
		}
	}
}

func TestParseParameters(t *testing.T) {
	type parameters = map[string]string
	for name, c := range map[string]struct {
		in      parameters
		want    Parameters
		refused bool
	}{
		"none":  {nil, Parameters{}, false},
		"pool":  {parameters{"pool": "fast-1"}, Parameters{Pool: "fast-1"}, false},
		"thin":  {parameters{"provisioning": "thin"}, Parameters{Provisioning: blockdev.Thin}, false},
		"thick": {parameters{"provisioning": "thick"}, Parameters{Provisioning: blockdev.Thick}, false},
		"all":   {parameters{"pool": "a", "provisioning": "thin"}, Parameters{Pool: "a", Provisioning: blockdev.Thin}, false},
		"orchestrator's": {parameters{"csi.storage.k8s.io/pvc/name": "x", "csi.storage.k8s.io/pvc/namespace": "y", "csi.storage.k8s.io/pv/name": "z", "pool": "a"},
			Parameters{Pool: "a", For: volume.Requester{Namespace: "y", Name: "x", PersistentVolume: "z"}}, false},
		"a name that is none":           {parameters{"csi.storage.k8s.io/pvc/name": strings.Repeat("x", 254)}, Parameters{}, true},
		"empty pool":                    {parameters{"pool": ""}, Parameters{}, true},
		"pool as path":                  {parameters{"pool": "../etc"}, Parameters{}, true},
		"unknown":                       {parameters{"Pool": "a"}, Parameters{}, true},
		"unknown, of k8s":               {parameters{"storage.k8s.io/x": "a"}, Parameters{}, true},
		"bad provisioning":              {parameters{"provisioning": "Thin"}, Parameters{}, true},
		"no provisioning":               {parameters{"provisioning": ""}, Parameters{}, true},
		"size":                          {parameters{"size": "1Gi"}, Parameters{}, true},
		"filesystem":                    {parameters{"csi.storage.k8s.io/fstype": "xfs"}, Parameters{Filesystem: filesystem.XFS}, false},
		"filesystem, deprecated":        {parameters{"fstype": "btrfs"}, Parameters{Filesystem: filesystem.Btrfs}, false},
		"filesystem, of the old days":   {parameters{"fsType": "ext4"}, Parameters{Filesystem: filesystem.Ext4}, false},
		"filesystem, in capitals":       {parameters{"FSTYPE": "xfs"}, Parameters{Filesystem: filesystem.XFS}, false},
		"filesystem left to others":     {parameters{"fstype": ""}, Parameters{}, false},
		"filesystem twice":              {parameters{"fstype": "xfs", "csi.storage.k8s.io/fstype": "xfs"}, Parameters{}, true},
		"filesystem twice, one empty":   {parameters{"fstype": "", "csi.storage.k8s.io/fstype": "xfs"}, Parameters{}, true},
		"filesystem in two cases":       {parameters{"fstype": "xfs", "fsType": "xfs"}, Parameters{}, true},
		"unknown filesystem":            {parameters{"fstype": "zfs"}, Parameters{}, true},
		"filesystem's name in capitals": {parameters{"fstype": "XFS"}, Parameters{}, true},
		"encryption":                    {parameters{"encryption": "luks2"}, Parameters{Encryption: volume.Encryption{Scheme: volume.LUKS2}}, false},
		"encryption, discards":          {parameters{"encryption": "luks2", "encryption.discard": "true"}, Parameters{Encryption: volume.Encryption{Scheme: volume.LUKS2, Discards: true}}, false},
		"encryption, no discards":       {parameters{"encryption.discard": "false", "encryption": "luks2"}, Parameters{Encryption: volume.Encryption{Scheme: volume.LUKS2}}, false},
		"encryption, another":           {parameters{"encryption": "luks1"}, Parameters{}, true},
		"encryption, in capitals":       {parameters{"encryption": "LUKS2"}, Parameters{}, true},
		"encryption, empty":             {parameters{"encryption": ""}, Parameters{}, true},
		"encryption, none":              {parameters{"encryption": "none"}, Parameters{}, true},
		"discards of what is plain":     {parameters{"encryption.discard": "true"}, Parameters{}, true},
		"no discards of what is plain":  {parameters{"encryption.discard": "false"}, Parameters{}, true},
		"discards, maybe":               {parameters{"encryption": "luks2", "encryption.discard": "yes"}, Parameters{}, true},
		"discards, empty":               {parameters{"encryption": "luks2", "encryption.discard": ""}, Parameters{}, true},
		"a key among the parameters":    {parameters{"encryption": "luks2", "passphrase": "x"}, Parameters{}, true},
		"almost fstype":                 {parameters{"fſtype": "xfs"}, Parameters{}, true}, // U+017F folds to s, and is none
	} {
		t.Run(name, func(t *testing.T) {
			p, err := ParseParameters(c.in)
			if errors.Is(err, errdefs.ErrInvalid) != c.refused || (err != nil) != c.refused || (err == nil && p != c.want) {
				t.Errorf("%+v, %v; want %+v, refused %v", p, err, c.want, c.refused)
			}
		})
	}
}

// TestEncryptionErrors: they name the parameter, and not what may be a key.
func TestEncryptionErrors(t *testing.T) {
	for _, c := range []struct {
		in   map[string]string
		want string
	}{
		{map[string]string{"encryption": "luks1"}, `parameter encryption="luks1"; luks2 is known`},
		{map[string]string{"encryption.discard": "true"}, `parameter encryption.discard="true" is for volumes that are encrypted; give encryption too`},
		{map[string]string{"encryption": "luks2", "encryption.discard": "1"}, `parameter encryption.discard="1"; true and false are known`},
		{map[string]string{"encryption": "luks2", "passphrase": "s3cr3t"}, `unknown parameter "passphrase"`},
	} {
		for _, parse := range []func() error{
			func() error { _, err := ParseParameters(c.in); return err },
			func() error { _, _, err := ParseEphemeral(c.in); return err },
		} {
			if err := parse(); !errors.Is(err, errdefs.ErrInvalid) || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "s3cr3t") {
				t.Errorf("%v: %v; want %s", c.in, err, c.want)
			}
		}
	}
}

// TestAgree: what the parameters say and what the capabilities ask for is one filesystem.
func TestAgree(t *testing.T) {
	for name, c := range map[string]struct {
		parameter, asked filesystem.Type
		refused          bool
	}{
		"nothing said":     {"", filesystem.XFS, false},
		"the same":         {filesystem.XFS, filesystem.XFS, false},
		"another":          {filesystem.XFS, filesystem.Ext4, true},
		"for block access": {filesystem.XFS, "", false}, // a class is for claims of both kinds
	} {
		if err := (Parameters{Filesystem: c.parameter}).Agree(c.asked); (err != nil) != c.refused || (err != nil && !errors.Is(err, errdefs.ErrInvalid)) {
			t.Errorf("%s: %v, want it refused: %v", name, err, c.refused)
		}
	}
}

func TestParseEphemeral(t *testing.T) {
	context := map[string]string{"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.name": "p", "pool": "a", "provisioning": "thin", "size": "3Gi"}
	before := maps.Clone(context)
	p, size, err := ParseEphemeral(context)
	if err != nil || p != (Parameters{Pool: "a", Provisioning: blockdev.Thin}) || size != (volume.Range{Required: 3 << 30}) || !IsEphemeral(context) {
		t.Errorf("%+v, %+v, %v, ephemeral %v", p, size, err, IsEphemeral(context))
	}
	if !maps.Equal(context, before) {
		t.Errorf("the context was changed to %v", context)
	}
	for _, other := range []map[string]string{nil, {"csi.storage.k8s.io/ephemeral": "false"}, {"ephemeral": "true"}} {
		if IsEphemeral(other) {
			t.Errorf("%v is ephemeral", other)
		}
	}
	if p, _, err := ParseEphemeral(map[string]string{"size": "1Gi", "encryption": "luks2", "encryption.discard": "true"}); err != nil || p.Encryption != (volume.Encryption{Scheme: volume.LUKS2, Discards: true}) {
		t.Errorf("an encrypted one: %+v, %v", p, err)
	}
	if _, size, err := ParseEphemeral(nil); err != nil || size != (volume.Range{}) {
		t.Errorf("without a size: %+v, %v", size, err)
	}
	if _, _, err := ParseEphemeral(map[string]string{"sizes": "1"}); !errors.Is(err, errdefs.ErrInvalid) {
		t.Errorf("unknown attribute: %v", err)
	}
}

func TestQuantities(t *testing.T) {
	for text, want := range map[string]int64{
		"1": 1, "4096": 4096, "1Ki": 1 << 10, "2Mi": 2 << 20, "3Gi": 3 << 30, "1Ti": 1 << 40, "5k": 5e3, "6M": 6e6, "7G": 7e9, "8T": 8e12,
		"007": 7, "15Ti": 15 << 40, strconv.FormatInt(blockdev.MaxSize, 10): blockdev.MaxSize,
		// Refused:
		"": 0, "0": 0, "-1": 0, "1.5Gi": 0, "Gi": 0, "1gi": 0, "1 Gi": 0, "1GiB": 0, "1K": 0, "1e3": 0, "0x10": 0, "1Gi\n": 0, "1_000": 0,
		"16Ti": 0, "17592186044416": 0, "9223372036854775807": 0, "9223372036854775808": 0, "9007199254740993Ki": 0, "-9223372036854775808Ti": 0,
	} {
		_, size, err := ParseEphemeral(map[string]string{"size": text})
		if size.Required != want || size.Limit != 0 || (err == nil) != (want > 0) || (err != nil && !errors.Is(err, errdefs.ErrInvalid)) {
			t.Errorf("%q: %+v, %v; want %d", text, size, err, want)
		}
	}
}

func TestHealth(t *testing.T) {
	if h := Health("id", nil); h.VolumeId != "id" || len(h.HealthStatuses) != 0 {
		t.Errorf("a healthy volume: %v", h)
	}
	want := map[blockdev.Severity]csi.VolumeHealthErrorType{blockdev.Degraded: csi.VolumeHealthErrorType_DEGRADED,
		blockdev.Inaccessible: csi.VolumeHealthErrorType_INACCESSIBLE, blockdev.DataLoss: csi.VolumeHealthErrorType_DATA_LOSS}
	var problems []blockdev.Problem
	for severity := range want {
		problems = append(problems, blockdev.Problem{Severity: severity, Reason: "Reason" + strconv.Itoa(int(severity)), Message: "m" + strconv.Itoa(int(severity))})
	}
	h := Health("id", problems)
	if len(h.HealthStatuses) != len(problems) {
		t.Fatalf("%d statuses for %d problems", len(h.HealthStatuses), len(problems))
	}
	for i, p := range problems {
		if s := h.HealthStatuses[i]; s.Status != want[p.Severity] || s.Reason != p.Reason || s.Message != p.Message {
			t.Errorf("%+v became %v", p, s)
		}
	}

	// Two of three replicas are not current.
	h = Health("id", []blockdev.Problem{{Severity: blockdev.Degraded, Reason: "R", Message: "b"}, {Severity: blockdev.Inaccessible, Reason: "R", Message: "x"},
		{Severity: blockdev.Degraded, Reason: "R", Message: "c"}})
	if s := h.HealthStatuses; len(s) != 2 || s[0].Message != "b; c" || s[1].Message != "x" {
		t.Errorf("problems with one reason became %v", s)
	}
}

func TestTopology(t *testing.T) {
	if s := Topology("n").GetSegments(); !maps.Equal(s, map[string]string{"topology.ashlar.dev/node": "n"}) {
		t.Errorf("segments %v", s)
	}
}

// FuzzParseParameters: what is let through is what there is, and nothing else is.
func FuzzParseParameters(f *testing.F) {
	for _, seed := range [][2]string{{"pool", "default"}, {"provisioning", "thin"}, {"provisioning", "thick"}, {"pool", ""}, {"pool", "-"}, {"x", "y"},
		{"csi.storage.k8s.io/fstype", "xfs"}, {"fsType", "btrfs"}, {"fstype", "zfs"}, {"csi.storage.k8s.io/", ""}, {"csi.storage.k8s.io", ""}, {"pool", "a/../b"}, {"encryption", "luks2"}, {"encryption.discard", "true"}} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, key, value string) {
		p, err := ParseParameters(map[string]string{key: value})
		var want Parameters
		known := true
		switch {
		case key == "encryption" && value == "luks2":
			want.Encryption.Scheme = volume.LUKS2
		case key == "pool" && blockdev.ValidPoolName(value):
			want.Pool = value
		case key == "provisioning" && (value == "thin" || value == "thick"):
			want.Provisioning = blockdev.Provisioning(value)
		case strings.ToLower(key) == "fstype", key == "csi.storage.k8s.io/fstype":
			want.Filesystem = filesystem.Type(value)
			known = slices.Contains([]string{"", "ext4", "xfs", "btrfs"}, value)
		default:
			known = strings.HasPrefix(key, "csi.storage.k8s.io/")
		}
		if known != (err == nil) || (err != nil && !errors.Is(err, errdefs.ErrInvalid)) || (known && p != want) {
			t.Fatalf("%q=%q: %+v, %v; want %+v, known %v", key, value, p, err, want, known)
		}
	})
}

// FuzzParseEphemeral: a size that is accepted is one that a volume can have, and no
// number is misread.
func FuzzParseEphemeral(f *testing.F) {
	for _, seed := range []string{"1Gi", "0", "-1", "16Ti", "15Ti", "1.5G", "17592186040320", "17592186044416", "9223372036854775807k", "", "Ki", "+1", "1e9", "٣"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		_, size, err := ParseEphemeral(map[string]string{"size": text})
		if err != nil {
			if !errors.Is(err, errdefs.ErrInvalid) || size != (volume.Range{}) {
				t.Fatalf("%q: %+v, %v", text, size, err)
			}
			return
		}
		n := size.Required
		if n <= 0 || n > blockdev.MaxSize || size.Limit != 0 {
			t.Fatalf("%q: %+v", text, size)
		}
		if plain, err := strconv.ParseInt(text, 10, 64); err == nil && plain != n {
			t.Fatalf("%q: %d", text, n)
		}
		// Written in bytes it is the same size.
		if _, again, err := ParseEphemeral(map[string]string{"size": strconv.FormatInt(n, 10)}); err != nil || again != size {
			t.Fatalf("%q is %d bytes, which are %+v, %v", text, n, again, err)
		}
	})
}

// TestClassParameters: the described parameters are those that are read, each once. So an error about an unknown one names all that are known.
func TestClassParameters(t *testing.T) {
	read := append(slices.Collect(maps.Keys(readers)), fsType)
	var described []string
	for _, p := range ClassParameters() {
		described = append(described, p.Name)
	}
	slices.Sort(read)
	slices.Sort(described)
	if !slices.Equal(read, described) {
		t.Errorf("read are %q, described %q", read, described)
	}
}
