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

// ToVolume returns the volume of an object: as it is (status), or before its node has made it, as it is to be (spec). Whether it is formatted only the
// node knows.
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

// ToClaim returns a claim of an object as one of pkg/volume.
func ToClaim(c *v1alpha1.Claim) volume.Claim {
	return volume.Claim{Node: c.Node, ReadOnly: c.ReadOnly, Mode: c.Mode, Generation: c.Generation}
}

// ClaimOn returns the claim of a node on a volume; if that node has none, the claim of another one; the zero claim if nobody has one.
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

// EncryptionOf returns how a volume is to be encrypted.
func EncryptionOf(v *v1alpha1.Volume) volume.Encryption {
	return volume.Encryption{Scheme: volume.Scheme(v.Spec.Encryption), Discards: v.Spec.EncryptionDiscard}
}

// HomeTimeoutOf returns how long the I/O of other nodes waits for the node of a volume.
func HomeTimeoutOf(v *v1alpha1.Volume) time.Duration {
	return time.Duration(v.Spec.HomeTimeout) * time.Second
}

// ToSnapshot returns the snapshot of an object. If it belongs to a group, it has the name of the member (MemberName).
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

// ToProblems returns the health of an object as problems of pkg/blockdev.
func ToProblems(health []v1alpha1.Problem) []blockdev.Problem {
	var problems []blockdev.Problem
	for _, p := range health {
		problems = append(problems, blockdev.Problem{Severity: severities[p.Severity], Reason: p.Reason, Message: p.Message})
	}
	return problems
}

// mostProblems is how many problems an object can hold (maxItems in its definition).
const mostProblems = 16

// FromProblems returns problems as an object has them: the worst first, mostProblems at most. A problem whose reason is in before keeps the time from
// there (since).
func FromProblems(problems []blockdev.Problem, before []v1alpha1.Problem) []v1alpha1.Problem {
	now := metav1.Now().Rfc3339Copy() // whole seconds, as objects have them
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
