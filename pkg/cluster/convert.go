package cluster

import (
	"cmp"
	"maps"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/filesystem"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// ToVolume is an object as the domain sees it: as it is once the node has made it, and
// as it will be before. The format is known to the node alone.
func ToVolume(v *v1alpha1.Volume) volume.Volume {
	out := volume.Volume{ID: VolumeID(v), Pool: v.Spec.Pool, Name: v.Spec.Name, Size: v.Spec.Size, Thin: v.Spec.Provisioning == string(blockdev.Thin), Source: SourceOf(v),
		Filesystem: filesystem.Type(v.Spec.Filesystem), Encryption: EncryptionOf(v), Mutable: map[string]string{}, Node: v.Spec.NodeName,
		Access: volume.Access(v.Spec.Access), HomeTimeout: HomeTimeoutOf(v), ReplicaOf: v.Spec.ReplicaOf}
	maps.Copy(out.Mutable, v.Spec.Mutable)
	if v.Status.Created != nil {
		out.Size, out.Thin, out.Created = v.Status.Size, v.Status.Thin, v.Status.Created.Time
		out.Encryption.Scheme = volume.Scheme(v.Status.Encryption)
		out.Mutable = map[string]string{}
		maps.Copy(out.Mutable, v.Status.Mutable)
	}
	out.For = RequesterOf(v)
	if c := v.Spec.Claim; c != nil {
		out.Claim = ToClaim(c)
	}
	for _, c := range v.Spec.Readers {
		out.Readers = append(out.Readers, c.Node)
	}
	return out
}

// ToClaim is a claim as the domain sees it.
func ToClaim(c *v1alpha1.Claim) volume.Claim {
	return volume.Claim{Node: c.Node, ReadOnly: c.ReadOnly, Mode: c.Mode, Generation: c.Generation}
}

// ClaimOn is the claim of a node, or, if that has none, that of another one.
func ClaimOn(v *v1alpha1.Volume, node string) volume.Claim {
	c := v.ClaimOf(node)
	if c == nil {
		c = v.Spec.Claim
	}
	if c == nil && len(v.Spec.Readers) > 0 {
		c = &v.Spec.Readers[0]
	}
	if c == nil {
		return volume.Claim{}
	}
	return ToClaim(c)
}

// EncryptionOf says how a volume is to be encrypted.
func EncryptionOf(v *v1alpha1.Volume) volume.Encryption {
	return volume.Encryption{Scheme: volume.Scheme(v.Spec.Encryption), Discards: v.Spec.EncryptionDiscard}
}

// HomeTimeoutOf says how long other nodes wait for the node of a volume.
func HomeTimeoutOf(v *v1alpha1.Volume) time.Duration {
	return time.Duration(v.Spec.HomeTimeout) * time.Second
}

// Keeps is how many bytes a pool keeps, or is to keep, of a volume.
func Keeps(v *v1alpha1.Volume) int64 { return v.Spec.Size + EncryptionOf(v).Scheme.Overhead() }

// SnapshotKeeps is how many bytes a pool keeps of a snapshot.
func SnapshotKeeps(s *v1alpha1.Snapshot) int64 {
	return s.Status.Size + volume.Scheme(s.Spec.Encryption).Overhead()
}

// ToSnapshot is an object as the domain sees it.
func ToSnapshot(s *v1alpha1.Snapshot) volume.Snapshot {
	out := volume.Snapshot{ID: SnapshotID(s), Name: s.Spec.Name, Source: SnapshotSource(s), Size: s.Status.Size,
		Scheme: volume.Scheme(s.Spec.Encryption), Node: s.Spec.NodeName}
	if s.Status.Created != nil {
		out.Created = s.Status.Created.Time
	}
	if g := s.Spec.Group; g != nil {
		out.Group, out.GroupSize, out.Name = volume.GroupID{Key: g.Key}, g.Size, MemberName(s.Spec.Name, out.Source)
	}
	return out
}

var severities = map[string]blockdev.Severity{"Degraded": blockdev.Degraded, "Inaccessible": blockdev.Inaccessible, "DataLoss": blockdev.DataLoss}

// ToProblems is the health of an object as the domain sees it.
func ToProblems(health []v1alpha1.Problem) []blockdev.Problem {
	var problems []blockdev.Problem
	for _, p := range health {
		problems = append(problems, blockdev.Problem{Severity: severities[p.Severity], Reason: p.Reason, Message: p.Message})
	}
	return problems
}

// mostProblems is how many problems an object can hold.
const mostProblems = 16

// FromProblems is health as an object has it: the worst first, and no more than it can hold. What was known before is as old as it was.
func FromProblems(problems []blockdev.Problem, before []v1alpha1.Problem) []v1alpha1.Problem {
	now := metav1.Now().Rfc3339Copy() // what an object holds
	var health []v1alpha1.Problem
	for _, p := range slices.SortedStableFunc(slices.Values(problems), func(a, b blockdev.Problem) int { return cmp.Compare(b.Severity, a.Severity) }) {
		for word, severity := range severities {
			if severity == p.Severity {
				one := v1alpha1.Problem{Severity: word, Reason: p.Reason, Message: Limited(p.Message), Since: &now}
				if at := slices.IndexFunc(before, func(b v1alpha1.Problem) bool { return b.Reason == p.Reason && b.Since != nil }); at >= 0 {
					one.Since = before[at].Since
				}
				health = append(health, one)
			}
		}
	}
	return health[:min(len(health), mostProblems)]
}
