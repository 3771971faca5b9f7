package controller_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ashlar-csi/ashlar/internal/check"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-lib-utils/accessmodes"
	corev1 "k8s.io/api/core/v1"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/pooltest"
	"github.com/ashlar-csi/ashlar/pkg/controller"
	"github.com/ashlar-csi/ashlar/pkg/csimap"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

func TestCreateVolumeRefuses(t *testing.T) {
	f := start(t, 0)
	ext4, raw := f.create(wanted("of ext4")), wanted("raw")
	raw.VolumeCapabilities = []*csi.VolumeCapability{capability(block)}
	f.create(raw)
	snapshot := f.cut("of ext4", ext4)
	type request = *csi.CreateVolumeRequest
	ask := func(change func(c *csi.VolumeCapability)) func(request) {
		return func(r request) { change(r.VolumeCapabilities[0]) }
	}
	sized := func(required, limit int64) func(request) {
		return func(r request) { r.CapacityRange = &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit} }
	}
	parameter := func(key, value string) func(request) {
		return func(r request) { r.Parameters[key] = value }
	}
	at := func(topologies ...*csi.Topology) func(request) {
		return func(r request) { r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: topologies} }
	}
	from := func(source *csi.VolumeContentSource) func(request) {
		return func(r request) { r.VolumeContentSource = source }
	}
	refuses := drivertest.Refuses(t, f.CreateVolume, func() request { return wanted("v") })
	refuses("no name", func(r request) { r.Name = "" }, errdefs.ErrInvalid, "the request has no name")
	refuses("a long name", func(r request) { r.Name = strings.Repeat("ü", 129) }, errdefs.ErrInvalid, "258 bytes, 256 are the most")
	refuses("a bell in its name", func(r request) { r.Name = "v\a" }, errdefs.ErrInvalid, "control character at byte 1")
	refuses("a C1 control in its name", func(r request) { r.Name = "\u0085" }, errdefs.ErrInvalid, "control character at byte 0")
	refuses("no capability", func(r request) { r.VolumeCapabilities = nil }, errdefs.ErrInvalid, "no volume capability")
	refuses("a capability that is none", func(r request) { r.VolumeCapabilities = append(r.VolumeCapabilities, nil) }, errdefs.ErrInvalid, "no volume capability")
	refuses("no access type", ask(func(c *csi.VolumeCapability) { c.AccessType = nil }), errdefs.ErrInvalid, "block or mount")
	refuses("no access mode", ask(func(c *csi.VolumeCapability) { c.AccessMode = nil }), errdefs.ErrInvalid, "access mode UNKNOWN")
	refuses("writers on many nodes", ask(func(c *csi.VolumeCapability) {
		c.AccessMode.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	}), errdefs.ErrInvalid, "a volume is written on one node")
	refuses("an unknown encryption", parameter("encryption", "aes"), errdefs.ErrInvalid, `parameter encryption="aes"; luks2 is known`)
	refuses("discards of what is not encrypted", parameter("encryption.discard", "true"), errdefs.ErrInvalid, `parameter encryption.discard="true" is for volumes that are encrypted`)
	refuses("an unknown filesystem", ask(func(c *csi.VolumeCapability) { c.GetMount().FsType = "zfs" }), errdefs.ErrInvalid, "ext4, xfs and btrfs can be had")
	refuses("two filesystems", func(r request) {
		r.VolumeCapabilities = append(r.VolumeCapabilities, capability("xfs"))
	}, errdefs.ErrInvalid, "both ext4 and xfs")
	refuses("a group of files", ask(func(c *csi.VolumeCapability) { c.GetMount().VolumeMountGroup = "1000" }), errdefs.ErrInvalid, "leave the group of files to the kubelet")
	refuses("a flag that binds", ask(func(c *csi.VolumeCapability) { c.GetMount().MountFlags = []string{"noatime,bind"} }), errdefs.ErrInvalid, "mount option bind")
	refuses("a flag that stops the node", ask(func(c *csi.VolumeCapability) { c.GetMount().MountFlags = []string{"errors=panic"} }), errdefs.ErrInvalid, "take the node down")
	refuses("a flag for another device", ask(func(c *csi.VolumeCapability) { c.GetMount().MountFlags = []string{"journal_path=/dev/sda"} }), errdefs.ErrInvalid, "a volume is one device")
	refuses("an unknown parameter", parameter("copy", "3"), errdefs.ErrInvalid, `unknown parameter "copy"; known are pool, spread, copies, provisioning, encryption, encryption.discard, access, homeTimeout, replicas, replicaTopologyKey, replaceAfter, placement, csi.storage.k8s.io/fstype`)
	refuses("an unknown place for copies", parameter("copies", "nowhere"), errdefs.ErrInvalid, `copies="nowhere"; local and anywhere are known`)
	refuses("an unknown pool", parameter("pool", "nowhere"), errdefs.ErrInvalid, `pool="nowhere": known are [fast slow]`)
	refuses("a pool that is no name", parameter("pool", "../etc"), errdefs.ErrInvalid, `"../etc" is neither the name of a pool`)
	refuses("a set with what is no name", parameter("pool", "fast,Slow"), errdefs.ErrInvalid, `pool="fast,Slow": "Slow" is neither`)
	refuses("a set of no pools", parameter("pool", "ssd-*"), errdefs.ErrInvalid, `pool="ssd-*": known are [fast slow]`)
	refuses("an unknown spread", parameter("spread", "true"), errdefs.ErrInvalid, `spread="true"; preferred and required are known`)
	refuses("access of an unknown kind", parameter("access", "all"), errdefs.ErrInvalid, `parameter access="all"; node and any are known`)
	refuses("access for other nodes, where there are none", parameter("access", "any"), errdefs.ErrInvalid, "parameter access=any: this driver has one machine")
	refuses("a placement that is not known", parameter("placement", "near"), errdefs.ErrInvalid, `placement="near"; stay and follow are known`)
	refuses("bytes that follow, of a volume of one node", parameter("placement", "follow"), errdefs.ErrInvalid, `placement=follow is for volumes that other nodes than their own can use`)
	refuses("the same of an attributes class", func(r request) { r.MutableParameters = map[string]string{"placement": "follow"} }, errdefs.ErrInvalid, `placement=follow is for volumes that other nodes`)
	refuses("a timeout without such access", parameter("homeTimeout", "10m"), errdefs.ErrInvalid, `parameter homeTimeout="10m" is for volumes that other nodes than their own can use`)
	for _, bad := range []string{"", "10", "0s", "-1m", "1.5s", "for ever"} {
		refuses("a timeout of "+bad, func(r request) { r.Parameters = map[string]string{"access": "any", "homeTimeout": bad} }, errdefs.ErrInvalid, `parameter homeTimeout="`+bad+`"; give whole seconds`)
	}
	replicas := func(pairs ...string) func(request) {
		return func(r request) {
			for i := 0; i < len(pairs); i += 2 {
				r.Parameters[pairs[i]] = pairs[i+1]
			}
		}
	}
	refuses("replicas on one machine", replicas("access", "any", "replicas", "2"), errdefs.ErrInvalid, "parameter replicas=2: this driver has one machine, and each replica needs one of its own")
	refuses("replicas that one node alone could use", replicas("replicas", "2"), errdefs.ErrInvalid, "parameter replicas=2 is for volumes that other nodes than their own can use; give access=any too")
	refuses("replicas that follow", replicas("access", "any", "replicas", "2", "placement", "follow"), errdefs.ErrInvalid, "parameter placement=follow is for volumes on one node")
	refuses("replicas that follow by an attributes class", func(r request) {
		replicas("access", "any", "replicas", "2")(r)
		r.MutableParameters = map[string]string{"placement": "follow"}
	}, errdefs.ErrInvalid, "parameter placement=follow is for volumes on one node")
	for _, bad := range []string{"", "0", "4", "02", "+2", "two"} {
		refuses("replicas "+bad, replicas("access", "any", "replicas", bad), errdefs.ErrInvalid, `parameter replicas="`+bad+`"; 1 to 3 can be had`)
	}
	for _, bad := range []string{"", "-1m", "1.5s", "never"} {
		refuses("replaced after "+bad, replicas("access", "any", "replicas", "2", "replaceAfter", bad), errdefs.ErrInvalid, `parameter replaceAfter="`+bad+`"; give whole seconds`)
	}
	refuses("replicas apart by no label", replicas("access", "any", "replicas", "2", "replicaTopologyKey", "a=b"), errdefs.ErrInvalid, `parameter replicaTopologyKey="a=b"; give the key of a label`)
	refuses("replacement of the only one", replicas("access", "any", "replicas", "1", "replaceAfter", "1m"), errdefs.ErrInvalid, `parameter replaceAfter="1m" is for volumes with more than one replica`)
	refuses("a spread of nobody's claims", parameter("spread", "required"), errdefs.ErrInvalid, "--extra-create-metadata")
	refuses("unknown provisioning", parameter("provisioning", "fat"), errdefs.ErrInvalid, "thick and thin are known")
	refuses("a parameter against its capability", parameter("fstype", "xfs"), errdefs.ErrInvalid, "the parameters say filesystem xfs, and the volume capability ext4")
	refuses("an unknown mutable parameter", func(r request) { r.MutableParameters = map[string]string{"iops": "9"} }, errdefs.ErrInvalid, `unknown mutable parameter "iops"; known are ioScheduler, placement, readAheadKiB`)
	refuses("a mutable parameter out of range", func(r request) { r.MutableParameters = map[string]string{"readAheadKiB": "-4"} }, errdefs.ErrInvalid, "multiple of 4 from 0 to 65536")
	refuses("a negative size", sized(-1, 0), errdefs.ErrInvalid, "required -1")
	refuses("a negative limit", sized(0, -1), errdefs.ErrInvalid, "limit -1")
	refuses("less than it requires", sized(2*mib, mib), errdefs.ErrInvalid, "required 2097152, limit 1048576")
	refuses("too small for its filesystem", sized(mib, mib), errdefs.ErrOutOfRange, "up to the limit of 1048576")
	refuses("between two blocks", sized(16*mib+1, 16*mib+2), errdefs.ErrOutOfRange, "no size in steps of 4096 bytes")
	refuses("more than a volume can have", sized(blockdev.MaxSize+1, 0), errdefs.ErrOutOfRange, "is the most")
	refuses("more than the pool has", sized(9<<30, 0), errdefs.ErrNoSpace, "bytes are left")
	refuses("another node", at(onNode("node-2")), errdefs.ErrNoSpace, "on node node-1, not on [node-2]")
	refuses("a topology without segments", at(&csi.Topology{}), errdefs.ErrInvalid, "says nothing")
	refuses("a node without a name", at(onNode("")), errdefs.ErrInvalid, "says nothing")
	refuses("a zone", at(&csi.Topology{Segments: map[string]string{"zone": "a"}}), errdefs.ErrInvalid, "does not name a node")
	refuses("a source that is none", from(&csi.VolumeContentSource{}), errdefs.ErrInvalid, "neither snapshot nor volume")
	refuses("a snapshot without an ID", from(fromSnapshot("")), errdefs.ErrInvalid, "no snapshot ID")
	refuses("a volume without an ID", from(fromVolume("")), errdefs.ErrInvalid, "no volume ID")
	refuses("a foreign source", from(fromVolume(foreign)), errdefs.ErrNotFound, foreign)
	refuses("a source that is gone", from(fromVolume(nothing)), errdefs.ErrNotFound, "00000000")
	refuses("a snapshot that is gone", from(fromSnapshot(nothingCut)), errdefs.ErrNotFound, "00000000")
	refuses("a volume that is a snapshot", from(fromVolume(snapshot)), errdefs.ErrNotFound, "is not the ID of a")
	refuses("a snapshot that is a volume", from(fromSnapshot(ext4)), errdefs.ErrNotFound, "is not the ID of a")
	refuses("a copy of another filesystem", func(r request) {
		r.VolumeContentSource, r.VolumeCapabilities[0] = fromSnapshot(snapshot), capability("btrfs")
	}, errdefs.ErrInvalid, "carries ext4")
	refuses("a copy that is smaller", func(r request) {
		r.VolumeContentSource, r.CapacityRange = fromVolume(ext4), &csi.CapacityRange{LimitBytes: 15 * mib}
	}, errdefs.ErrOutOfRange, "up to the limit of 15728640")
	if made := done(t, f.ListVolumes, &csi.ListVolumesRequest{}).GetEntries(); len(made) != 2 {
		t.Errorf("of refused requests volumes were made: %v", made)
	}
}

// TestCreateVolume: what a volume is like for requests with few and with many wishes; each request is answered twice, the same.
func TestCreateVolume(t *testing.T) {
	f := start(t, 0)
	source := f.create(wanted("source"))
	snapshot := f.cut("source", source)
	for what, c := range map[string]struct {
		change func(r *csi.CreateVolumeRequest)
		size   int64
		pool   string
	}{
		"as it comes":       {func(r *csi.CreateVolumeRequest) {}, 16 * mib, "fast"},
		"of no size":        {func(r *csi.CreateVolumeRequest) { r.CapacityRange = nil }, volume.DefaultSize, "fast"},
		"of a limit":        {func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{LimitBytes: 20*mib + 1} }, 20 * mib, "fast"},
		"rounded up":        {func(r *csi.CreateVolumeRequest) { r.CapacityRange.RequiredBytes++ }, 16*mib + blockdev.Granularity, "fast"},
		"of its filesystem": {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = capability("btrfs") }, 256 * mib, "fast"},
		"raw and small": {func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities[0], r.CapacityRange.RequiredBytes = capability(block), 1
		}, blockdev.Granularity, "fast"},
		"in a pool": {func(r *csi.CreateVolumeRequest) { r.Parameters["pool"] = "slow" }, 16 * mib, "slow"},
		"with the provisioner's own parameters": {func(r *csi.CreateVolumeRequest) {
			r.Parameters["csi.storage.k8s.io/pvc/name"], r.Parameters["csi.storage.k8s.io/fstype"] = "claim", "ext4"
		}, 16 * mib, "fast"},
		"here, as far as one can choose": {func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{onNode("node-2"), onNode(node)}}
		}, 16 * mib, "fast"},
		"a clone":             {func(r *csi.CreateVolumeRequest) { r.VolumeContentSource, r.CapacityRange = fromVolume(source), nil }, volume.DefaultSize, "fast"},
		"a restored snapshot": {func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = fromSnapshot(snapshot) }, 16 * mib, "fast"},
		"of the longest name": {func(r *csi.CreateVolumeRequest) { r.Name = strings.Repeat("n", 256) }, 16 * mib, "fast"},
		"of more than one line": {func(r *csi.CreateVolumeRequest) {
			r.Name = "a name\twith\nwhite space"
		}, 16 * mib, "fast"},
	} {
		t.Run(what, func(t *testing.T) {
			r := wanted(what)
			c.change(r)
			v := drivertest.Twice(t, f.CreateVolume, r).GetVolume()
			want := volume.ID{Kind: blockdev.Volume, Pool: c.pool, Key: volume.KeyOf(r.GetName())}.String()
			if v.GetVolumeId() != want || v.GetCapacityBytes() != c.size || len(v.GetVolumeContext()) != 0 ||
				v.GetContentSource().String() != r.GetVolumeContentSource().String() ||
				len(v.GetAccessibleTopology()) != 1 || v.GetAccessibleTopology()[0].GetSegments()[csimap.TopologyKey] != node {
				t.Errorf("created %v; want %s of %d bytes on %s", v, want, c.size, node)
			}
		})
	}
}

// TestCreateVolumeDiffers: a request with the name of another volume and other wishes is refused, and the error says which differ.
func TestCreateVolumeDiffers(t *testing.T) {
	f := start(t, 0)
	source := f.create(wanted("source"))
	f.create(wanted("v"))
	type request = *csi.CreateVolumeRequest
	refuses := drivertest.Refuses(t, f.CreateVolume, func() request { return wanted("v") })
	refuses("larger", func(r request) { r.CapacityRange.RequiredBytes++ }, errdefs.ErrExists, "has size 16777216")
	refuses("smaller", func(r request) {
		r.CapacityRange.RequiredBytes, r.CapacityRange.LimitBytes = 8*mib, 8*mib
	}, errdefs.ErrExists, "has size 16777216")
	refuses("another filesystem", func(r request) { r.VolumeCapabilities[0] = capability("xfs") }, errdefs.ErrExists, "has filesystem ext4, not xfs")
	refuses("raw", func(r request) { r.VolumeCapabilities[0] = capability(block) }, errdefs.ErrExists, "has filesystem ext4")
	refuses("thin", func(r request) { r.Parameters["provisioning"] = "thin" }, errdefs.ErrExists, "has provisioning thick, not thin")
	refuses("another pool", func(r request) { r.Parameters["pool"] = "slow" }, errdefs.ErrExists, "has pool fast, not slow")
	refuses("a copy", func(r request) { r.VolumeContentSource = fromVolume(source) }, errdefs.ErrExists, "not "+source)
	refuses("elsewhere", func(r request) {
		r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{onNode("node-2")}}
	}, errdefs.ErrNoSpace, "not on [node-2]")
	// Requests whose differences do not matter to the volume are answered with it.
	r := wanted("v")
	r.CapacityRange.LimitBytes = 32 * mib
	r.Parameters = map[string]string{"csi.storage.k8s.io/pvc/name": "another", "pool": "fast"}
	r.VolumeCapabilities = append(r.VolumeCapabilities, capability(block))
	if v := f.create(r); v != f.create(wanted("v")) {
		t.Errorf("made %s", v)
	}
}

// TestSecrets: the calls need no secrets; those that come are neither kept nor told.
func TestSecrets(t *testing.T) {
	const secret = "do-not-tell"
	f, secrets := start(t, 0), map[string]string{"key": secret}
	r := wanted("v")
	r.Secrets = secrets
	id := f.create(r)
	r.CapacityRange.RequiredBytes++
	_, differs := f.CreateVolume(t.Context(), r)
	_, gone := f.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: nothing, Secrets: secrets})
	_, claimed := f.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: "node-2", Secrets: secrets,
		VolumeCapability: capability("ext4")})
	said := fmt.Sprint(differs, gone, claimed, done(t, f.ListVolumes, &csi.ListVolumesRequest{}))
	if differs == nil || gone == nil || claimed == nil || strings.Contains(said, secret) {
		t.Errorf("answers: %s", said)
	}
}

// TestKubernetesAccessModes: all access modes of a claim can be had, but for ReadWriteMany.
func TestKubernetesAccessModes(t *testing.T) {
	f := start(t, 0)
	for mode, want := range map[corev1.PersistentVolumeAccessMode]error{
		corev1.ReadWriteOnce: nil, corev1.ReadWriteOncePod: nil, corev1.ReadOnlyMany: nil, corev1.ReadWriteMany: errdefs.ErrInvalid,
	} {
		asked, err := accessmodes.ToCSIAccessMode([]corev1.PersistentVolumeAccessMode{mode}, true)
		check.OK(t, err)
		r := wanted(string(mode))
		r.VolumeCapabilities[0].AccessMode.Mode = asked
		_, err = f.CreateVolume(t.Context(), r)
		pooltest.Fails(t, err, want, string(mode))
	}
}

// placed is a store that records for which nodes a volume was asked for, and with which encryption.
type placed struct {
	volume.Store
	nodes      []string
	encryption volume.Encryption
}

func (p *placed) Create(_ context.Context, spec volume.Spec) (volume.Volume, error) {
	p.nodes, p.encryption = spec.Nodes, spec.Encryption
	return volume.Volume{}, nil
}

// NodesIn: zone a has two nodes, zone b none.
func (p *placed) NodesIn(_ context.Context, labels map[string]string) ([]string, error) {
	if labels["zone"] == "a" {
		return []string{"a1", "a2"}, nil
	}
	return nil, fmt.Errorf("%w: no node with %v", errdefs.ErrNoSpace, labels)
}

// TestEncryption: the store is asked for the encryption that the class says.
func TestEncryption(t *testing.T) {
	for _, want := range []volume.Encryption{{}, {Scheme: volume.LUKS2}, {Scheme: volume.LUKS2, Discards: true}} {
		r := wanted("v")
		if want.Scheme != volume.NotEncrypted {
			r.Parameters["encryption"], r.Parameters["encryption.discard"] = string(want.Scheme), fmt.Sprint(want.Discards)
		}
		store := &placed{encryption: volume.Encryption{Scheme: "not asked"}}
		_, err := controller.New(store).CreateVolume(t.Context(), r)
		check.OK(t, err)
		if store.encryption != want {
			t.Errorf("asked for %+v; want %+v", store.encryption, want)
		}
	}
}

// TestTopology: the store is asked for the nodes that the request allows, the preferred ones first, each once.
func TestTopology(t *testing.T) {
	zone := func(name string) *csi.Topology { return &csi.Topology{Segments: map[string]string{"zone": name}} }
	both := &csi.Topology{Segments: map[string]string{"zone": "b", csimap.TopologyKey: "n1"}}
	type list = []*csi.Topology
	for what, c := range map[string]struct {
		preferred, requisite list
		want                 []string
		err                  error
	}{
		"none":                       {nil, nil, nil, nil},
		"requisite":                  {nil, list{onNode("n1"), onNode("n2")}, []string{"n1", "n2"}, nil},
		"preferred":                  {list{onNode("n2")}, list{onNode("n1"), onNode("n2")}, []string{"n2", "n1"}, nil},
		"a zone":                     {nil, list{zone("a")}, []string{"a1", "a2"}, nil},
		"a node and its zone":        {list{onNode("a2")}, list{zone("a")}, []string{"a2", "a1"}, nil},
		"a node within a zone":       {nil, list{both}, []string{"n1"}, nil},
		"a zone without nodes":       {nil, list{zone("b")}, nil, errdefs.ErrNoSpace},
		"a zone without, and one":    {list{zone("b")}, list{zone("b"), zone("a")}, []string{"a1", "a2"}, nil},
		"one that says nothing":      {nil, list{onNode("n1"), {}}, nil, errdefs.ErrInvalid},
		"a preferred one of no name": {list{onNode("")}, list{onNode("n1")}, nil, errdefs.ErrInvalid},
	} {
		store := &placed{}
		r := wanted("v")
		r.AccessibilityRequirements = &csi.TopologyRequirement{Preferred: c.preferred, Requisite: c.requisite}
		_, err := controller.New(store).CreateVolume(t.Context(), r)
		pooltest.Fails(t, err, c.err, what)
		if !slices.Equal(store.nodes, c.want) {
			t.Errorf("%s: asked for nodes %v, want %v", what, store.nodes, c.want)
		}
	}
}

func TestDeleteVolume(t *testing.T) {
	f := start(t, 0)
	id := f.create(wanted("v"))
	done(t, f.ControllerPublishVolume, claimOf(id))
	type request = *csi.DeleteVolumeRequest
	refuses := drivertest.Refuses(t, f.DeleteVolume, func() request { return &csi.DeleteVolumeRequest{VolumeId: id} })
	refuses("no ID", func(r request) { r.VolumeId = "" }, errdefs.ErrInvalid, "no volume ID")
	refuses("claimed", func(request) {}, errdefs.ErrInUse, "claimed by node node-1; unpublish it first")
	refuses("of a pool that is not there", func(r request) { r.VolumeId = strings.Replace(id, "fast", "gone", 1) }, errdefs.ErrUnavailable, `without pool "gone"`)
	done(t, f.ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{VolumeId: id})
	for _, gone := range []string{id, nothing, nothingCut, foreign} {
		drivertest.Twice(t, f.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: gone})
	}
	_, err := f.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	pooltest.Fails(t, err, errdefs.ErrNotFound, "a deleted volume")
}

// claimOf returns a request to publish a volume with ext4 to the node.
func claimOf(id string) *csi.ControllerPublishVolumeRequest {
	return &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: capability("ext4")}
}

func TestPublishVolume(t *testing.T) {
	f := start(t, 1)
	id, second := f.create(wanted("v")), f.create(wanted("second"))
	type request = *csi.ControllerPublishVolumeRequest
	right := func() request { return claimOf(id) }
	refuses := drivertest.Refuses(t, f.ControllerPublishVolume, right)
	refuses("no volume", func(r request) { r.VolumeId = "" }, errdefs.ErrInvalid, "no volume ID")
	refuses("no node", func(r request) { r.NodeId = "" }, errdefs.ErrInvalid, "no node ID")
	refuses("no capability", func(r request) { r.VolumeCapability = nil }, errdefs.ErrInvalid, "no volume capability")
	refuses("an access mode of many nodes", func(r request) {
		r.VolumeCapability.AccessMode.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER
	}, errdefs.ErrInvalid, "a volume is written on one node")
	refuses("a volume that is gone", func(r request) { r.VolumeId = nothing }, errdefs.ErrNotFound, "00000000")
	refuses("a foreign volume", func(r request) { r.VolumeId = foreign }, errdefs.ErrNotFound, foreign)
	refuses("a node that is not there", func(r request) { r.NodeId = "node-2" }, errdefs.ErrNotFound, `no node "node-2"; volume `+id+` is on node node-1`)
	if answer := drivertest.Twice(t, f.ControllerPublishVolume, right()); len(answer.GetPublishContext()) != 0 {
		t.Errorf("a writer is told %v", answer)
	}
	refuses = drivertest.Refuses(t, f.ControllerPublishVolume, right)
	refuses("read-only", func(r request) { r.Readonly = true }, errdefs.ErrExists, "read-only false")
	refuses("another access mode", func(r request) {
		r.VolumeCapability.AccessMode.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	}, errdefs.ErrExists, "with mode mount,SINGLE_NODE_MULTI_WRITER")
	refuses("block", func(r request) { r.VolumeCapability = capability(block) }, errdefs.ErrExists, "with mode mount")
	refuses("one volume more", func(r request) { r.VolumeId = second }, errdefs.ErrLimit, "node node-1 has 1 volumes, the most it can have")
	have := done(t, f.ControllerGetVolume, &csi.ControllerGetVolumeRequest{VolumeId: id})
	if nodes := have.GetStatus().GetPublishedNodeIds(); !slices.Equal(nodes, []string{node}) {
		t.Errorf("published to %v", nodes)
	}
	// The claim of a node is not released for another one; a volume that is gone has no claim.
	for _, r := range []*csi.ControllerUnpublishVolumeRequest{{VolumeId: id, NodeId: "node-2"}, {VolumeId: nothing, NodeId: node}, {VolumeId: foreign, NodeId: node}} {
		drivertest.Twice(t, f.ControllerUnpublishVolume, r)
	}
	_, err := f.ControllerUnpublishVolume(t.Context(), &csi.ControllerUnpublishVolumeRequest{})
	pooltest.Fails(t, err, errdefs.ErrInvalid, "a claim of no volume")
	_, err = f.ControllerPublishVolume(t.Context(), claimOf(second))
	pooltest.Fails(t, err, errdefs.ErrLimit, "the first is still claimed")
	drivertest.Twice(t, f.ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node})
	reader := claimOf(second)
	reader.Readonly = true
	if answer := drivertest.Twice(t, f.ControllerPublishVolume, reader); answer.GetPublishContext()[csimap.ReadOnlyKey] != "true" {
		t.Errorf("a reader is told %v", answer)
	}
	drivertest.Twice(t, f.ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{VolumeId: second}) // without a node: all claims
}

func TestValidateVolumeCapabilities(t *testing.T) {
	f := start(t, 0)
	id := f.create(wanted("v"))
	type request = *csi.ValidateVolumeCapabilitiesRequest
	right := func() request {
		return &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: []*csi.VolumeCapability{capability("ext4")},
			Parameters: map[string]string{"pool": "fast"}, MutableParameters: map[string]string{"readAheadKiB": "128"}, VolumeContext: map[string]string{"a": "b"}}
	}
	refuses := drivertest.Refuses(t, f.ValidateVolumeCapabilities, right)
	refuses("no volume", func(r request) { r.VolumeId = "" }, errdefs.ErrInvalid, "no volume ID")
	refuses("no capabilities", func(r request) { r.VolumeCapabilities = nil }, errdefs.ErrInvalid, "no volume capabilities")
	refuses("a volume that is gone", func(r request) { r.VolumeId = nothing }, errdefs.ErrNotFound, "00000000")
	confirmed := drivertest.Twice(t, f.ValidateVolumeCapabilities, right())
	if c, r := confirmed.GetConfirmed(), right(); c == nil || confirmed.GetMessage() != "" || c.GetVolumeCapabilities()[0].String() != r.VolumeCapabilities[0].String() ||
		c.GetParameters()["pool"] != "fast" || c.GetMutableParameters()["readAheadKiB"] != "128" || c.GetVolumeContext()["a"] != "b" {
		t.Errorf("confirmed %v", confirmed)
	}
	// A capability or parameter that cannot be had is no error: the message says what it is.
	for message, change := range map[string]func(request){
		"a volume is written on one node": func(r request) {
			r.VolumeCapabilities[0].AccessMode.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
		},
		`unknown parameter "x"`:         func(r request) { r.Parameters["x"] = "y" },
		"has pool fast, not slow":       func(r request) { r.Parameters["pool"] = "slow" },
		"has encryption":                func(r request) { r.Parameters["encryption"] = "luks2" },
		"has provisioning thick":        func(r request) { r.Parameters["provisioning"] = "thin" },
		"say filesystem xfs":            func(r request) { r.Parameters["fstype"] = "xfs" },
		`unknown mutable parameter "x"`: func(r request) { r.MutableParameters["x"] = "y" },
	} {
		r := right()
		change(r)
		if answer := drivertest.Twice(t, f.ValidateVolumeCapabilities, r); answer.GetConfirmed() != nil || !strings.Contains(answer.GetMessage(), message) {
			t.Errorf("answered %v, want a message with %q", answer, message)
		}
	}
}

func TestExpandVolume(t *testing.T) {
	f := start(t, 0)
	id := f.create(wanted("v"))
	type request = *csi.ControllerExpandVolumeRequest
	right := func() request {
		return &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 32 * mib}}
	}
	refuses := drivertest.Refuses(t, f.ControllerExpandVolume, right)
	refuses("no volume", func(r request) { r.VolumeId = "" }, errdefs.ErrInvalid, "no volume ID")
	refuses("no range", func(r request) { r.CapacityRange = nil }, errdefs.ErrInvalid, "no capacity range")
	refuses("a volume that is gone", func(r request) { r.VolumeId = nothing }, errdefs.ErrNotFound, "00000000")
	refuses("a capability that cannot be", func(r request) { r.VolumeCapability = &csi.VolumeCapability{} }, errdefs.ErrInvalid, "access mode UNKNOWN")
	refuses("a smaller one", func(r request) {
		r.CapacityRange = &csi.CapacityRange{LimitBytes: 8 * mib}
	}, errdefs.ErrOutOfRange, "volumes do not shrink")
	refuses("an impossible range", func(r request) { r.CapacityRange.LimitBytes = mib }, errdefs.ErrInvalid, "limit 1048576")
	refuses("more than the pool has", func(r request) { r.CapacityRange.RequiredBytes = 9 << 30 }, errdefs.ErrOutOfRange, "no room for it now: ")
	refuses("more than a volume can have", func(r request) { r.CapacityRange.RequiredBytes = 1 << 62 }, errdefs.ErrOutOfRange, "is the most")
	for _, c := range []struct {
		required, want int64
		capability     *csi.VolumeCapability
		onNode         bool
	}{
		{0, 16 * mib, nil, true}, // it has that size
		{32*mib - 1, 32 * mib, nil, true},
		{mib, 32 * mib, nil, true}, // it is larger already
		{40 * mib, 40 * mib, capability("ext4"), true},
		{48 * mib, 48 * mib, capability(block), false},
	} {
		r := right()
		r.CapacityRange.RequiredBytes, r.VolumeCapability = c.required, c.capability
		if answer := drivertest.Twice(t, f.ControllerExpandVolume, r); answer.GetCapacityBytes() != c.want || answer.GetNodeExpansionRequired() != c.onNode {
			t.Errorf("expanded to %d bytes: %v", c.required, answer)
		}
	}
}

func TestModifyVolume(t *testing.T) {
	f := start(t, 0)
	id := f.create(wanted("v"))
	type request = *csi.ControllerModifyVolumeRequest
	right := func() request {
		return &csi.ControllerModifyVolumeRequest{VolumeId: id, MutableParameters: map[string]string{"readAheadKiB": "64"}}
	}
	refuses := drivertest.Refuses(t, f.ControllerModifyVolume, right)
	refuses("no volume", func(r request) { r.VolumeId = "" }, errdefs.ErrInvalid, "no volume ID")
	refuses("a volume that is gone", func(r request) { r.VolumeId = nothing }, errdefs.ErrNotFound, "00000000")
	refuses("an unknown parameter", func(r request) { r.MutableParameters["pool"] = "slow" }, errdefs.ErrInvalid, `unknown mutable parameter "pool"`)
	refuses("a scheduler that is none", func(r request) { r.MutableParameters["ioScheduler"] = "fifo" }, errdefs.ErrInvalid, "none, mq-deadline, kyber and bfq are known")
	drivertest.Twice(t, f.ControllerModifyVolume, right())
	drivertest.Twice(t, f.ControllerModifyVolume, &csi.ControllerModifyVolumeRequest{VolumeId: id}) // nothing is to change
	// With --extra-modify-metadata, external-resizer also says whose the volume is.
	named := map[string]string{"readAheadKiB": "128", "csi.storage.k8s.io/pvc/name": "claim", "csi.storage.k8s.io/pvc/namespace": "default", "csi.storage.k8s.io/pv/name": "pvc-1"}
	drivertest.Twice(t, f.ControllerModifyVolume, &csi.ControllerModifyVolumeRequest{VolumeId: id, MutableParameters: named})
	r := wanted("named")
	r.MutableParameters = named
	valid := drivertest.Twice(t, f.ValidateVolumeCapabilities, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: f.create(r), VolumeCapabilities: r.GetVolumeCapabilities(), MutableParameters: named})
	if valid.GetConfirmed() == nil {
		t.Errorf("not confirmed: %s", valid.GetMessage())
	}
}

// TestPages: a list comes in pages of any size, each thing once, also if the last thing of a page is deleted meanwhile.
func TestPages(t *testing.T) {
	f := start(t, 0)
	var volumes, snapshots []string
	for i := range 5 {
		r := wanted(fmt.Sprint("v", i))
		r.Parameters["pool"] = []string{"fast", "slow"}[i%2]
		volumes = append(volumes, f.create(r))
		snapshots = append(snapshots, f.cut(fmt.Sprint("s", i), volumes[i]))
	}
	slices.Sort(volumes)
	slices.Sort(snapshots)
	page := map[string]func(most int32, token string) (ids []string, next string, err error){
		"volumes": func(most int32, token string) (ids []string, next string, err error) {
			r, err := f.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: most, StartingToken: token})
			for _, e := range r.GetEntries() {
				ids = append(ids, e.GetVolume().GetVolumeId())
			}
			return ids, r.GetNextToken(), err
		},
		"snapshots": func(most int32, token string) (ids []string, next string, err error) {
			r, err := f.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{MaxEntries: most, StartingToken: token})
			for _, e := range r.GetEntries() {
				ids = append(ids, e.GetSnapshot().GetSnapshotId())
			}
			return ids, r.GetNextToken(), err
		},
	}
	for what, want := range map[string][]string{"volumes": volumes, "snapshots": snapshots} {
		for most := range int32(7) {
			var ids []string
			for next, first := "", true; first || next != ""; first = false {
				some, after, err := page[what](most, next)
				check.OK(t, err)
				if most > 0 && len(some) > int(most) {
					t.Errorf("%s: a page of %d has %d", what, most, len(some))
				}
				ids, next = append(ids, some...), after
			}
			if !slices.Equal(ids, want) {
				t.Errorf("%s, %d at most: %v, want %v", what, most, ids, want)
			}
		}
		_, _, err := page[what](-1, "")
		pooltest.Fails(t, err, errdefs.ErrInvalid, "a negative number of "+what)
		for _, token := range []string{"5", foreign, map[string]string{"volumes": snapshots[0], "snapshots": volumes[0]}[what]} {
			_, _, err := page[what](1, token)
			pooltest.Fails(t, err, errdefs.ErrBadToken, "the token "+token)
		}
	}
	_, next, err := page["volumes"](2, "")
	check.OK(t, err)
	done(t, f.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: next})
	if rest, _, err := page["volumes"](0, next); err != nil || !slices.Equal(rest, volumes[2:]) {
		t.Errorf("after %s, which is gone: %v, %v", next, rest, err)
	}
	_, err = f.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{StartingToken: "5"})
	pooltest.Fails(t, err, errdefs.ErrBadToken, "a token of nobody")
	if health := done(t, f.ControllerListVolumeHealth, &csi.ControllerListVolumeHealthRequest{}); len(health.GetEntries()) != 0 {
		t.Errorf("volumes that nothing is wrong with: %v", health)
	}
}

func TestGetVolume(t *testing.T) {
	f := start(t, 0)
	id := f.create(wanted("v"))
	for given, want := range map[string]error{id: nil, "": errdefs.ErrInvalid, nothing: errdefs.ErrNotFound, nothingCut: errdefs.ErrNotFound, foreign: errdefs.ErrNotFound} {
		_, err := f.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: given})
		pooltest.Fails(t, err, want, "get "+given)
		_, err = f.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: given})
		pooltest.Fails(t, err, want, "health of "+given)
	}
	health := drivertest.Twice(t, f.ControllerGetVolumeHealth, &csi.ControllerGetVolumeHealthRequest{VolumeId: id}).GetVolumeHealth()
	if health.GetVolumeId() != id || len(health.GetHealthStatuses()) != 0 {
		t.Errorf("its health is %v", health)
	}
}

func TestGetCapacity(t *testing.T) {
	f := start(t, 0)
	type request = *csi.GetCapacityRequest
	right := func() request { return &csi.GetCapacityRequest{Parameters: map[string]string{}} }
	refuses := drivertest.Refuses(t, f.GetCapacity, right)
	refuses("an unknown pool", func(r request) { r.Parameters["pool"] = "nowhere" }, errdefs.ErrInvalid, "known are [fast slow]")
	refuses("an unknown parameter", func(r request) { r.Parameters["x"] = "y" }, errdefs.ErrInvalid, `unknown parameter "x"`)
	refuses("a capability that cannot be", func(r request) { r.VolumeCapabilities = []*csi.VolumeCapability{{}} }, errdefs.ErrInvalid, "access mode UNKNOWN")
	var encrypted blockdev.Capacity // no capacity on a machine that cannot encrypt
	if len(volume.SchemesHere()) > 0 {
		encrypted = blockdev.Capacity{Available: 8 << 30, MaxVolume: 8<<30 - volume.LUKS2.Overhead()}
	}
	for what, c := range map[string]struct {
		change                     func(request)
		available, largest, lowest int64
	}{
		"the default pool": {func(request) {}, 8 << 30, 8 << 30, blockdev.Granularity},
		"a pool":           {func(r request) { r.Parameters["pool"] = "slow" }, 1 << 30, 1 << 30, blockdev.Granularity},
		"of a filesystem": {func(r request) {
			r.VolumeCapabilities = []*csi.VolumeCapability{capability("xfs")}
		}, 8 << 30, 8 << 30, 300 * mib},
		"of the node":           {func(r request) { r.AccessibleTopology = onNode(node) }, 8 << 30, 8 << 30, blockdev.Granularity},
		"of another one":        {func(r request) { r.AccessibleTopology = onNode("node-2") }, 0, 0, blockdev.Granularity},
		"for what is encrypted": {func(r request) { r.Parameters["encryption"] = "luks2" }, encrypted.Available, encrypted.MaxVolume, blockdev.Granularity},
		"of a zone":             {func(r request) { r.AccessibleTopology = &csi.Topology{Segments: map[string]string{"zone": "a"}} }, 0, 0, blockdev.Granularity},
		"of nowhere":            {func(r request) { r.AccessibleTopology = &csi.Topology{} }, 0, 0, blockdev.Granularity},
	} {
		r := right()
		c.change(r)
		have := drivertest.Twice(t, f.GetCapacity, r)
		if have.GetAvailableCapacity() != c.available || have.GetMaximumVolumeSize().GetValue() != c.largest || have.GetMinimumVolumeSize().GetValue() != c.lowest {
			t.Errorf("%s: %v; want %d, up to %d, from %d on", what, have, c.available, c.largest, c.lowest)
		}
	}
	f.create(wanted("v"))
	if have := done(t, f.GetCapacity, right()); have.GetAvailableCapacity() != 8<<30-16*mib {
		t.Errorf("beside a volume of 16 MiB: %v", have)
	}
}
