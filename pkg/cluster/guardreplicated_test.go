package cluster_test

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// TestGuardReplicatedVolumes: an agent may write the status of a ReplicatedVolume that is claimed for its node, and nothing else, whatever rights it is
// granted.
func TestGuardReplicatedVolumes(t *testing.T) {
	w := newGuarded(t)
	made := func(name, node string) *v1alpha1.ReplicatedVolume {
		v := &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf(name)}, Spec: v1alpha1.ReplicatedVolumeSpec{
			Name: name, Pool: "default", Replicas: 2, Size: mib, Legs: []string{volume.KeyOf(name)}, Numbered: 1}}
		if node != "" {
			v.Spec.Claim, v.Spec.Claims = &v1alpha1.Claim{Node: node, Mode: "m", Generation: 1}, 1
		}
		check.OK(t, w.Create(w.ctx, v))
		return v
	}
	mine, others, free := made("used here", nodeName), made("used elsewhere", "node-2"), made("not used", "")
	const (
		ofAnother = "only of a replicated volume that is claimed for its node, which is node-1"
		noMore    = "an agent writes no more than the status of a replicated volume"
		opened    = `{"opened":1}`
	)
	w.try(t, nodeName, []attempt{
		reported(w, "its status", mine, opened, ""),
		reported(w, "that of another node's", others, opened, ofAnother),
		reported(w, "that of nobody's", free, `{"summary":"0 of 2"}`, ofAnother),
	})
	w.try(t, "", []attempt{reported(w, "without a node", mine, opened, nameless)})
	// More rights than those of rbac-node.yaml do not allow writes of the spec.
	config := apitest.Get(t).Config(apitest.Admin)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + apitest.Namespace + ":ashlar-node", Groups: []string{"system:masters"},
		Extra: map[string][]string{"authentication.kubernetes.io/node-name": {nodeName}}}
	type r = *v1alpha1.ReplicatedVolume
	w.tryAs(t, config, []attempt{
		changed(w, "its claim taken off", mine, func(o r) { o.Spec.Claim = nil }, noMore),
		changed(w, "claimed", free, func(o r) { o.Spec.Claim, o.Spec.Claims = &v1alpha1.Claim{Node: nodeName, Mode: "m", Generation: 1}, 1 }, noMore),
		changed(w, "labelled", mine, func(o r) { o.Labels = map[string]string{"a": "b"} }, noMore),
		created(w, "made", &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf("new")}, Spec: free.Spec}, noMore),
		removed(w, "deleted", mine, noMore),
	})
}
