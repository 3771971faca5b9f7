package cgroup

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// TestFind: the group above all pods, as kubelets of both cgroup drivers make it, at any cgroup root, and nothing else that is named like it.
func TestFind(t *testing.T) {
	for name, c := range map[string]struct{ groups, want []string }{
		"cgroupfs": {[]string{"kubepods/burstable/pod0a1b/4711", "kubepods/podffff", "system.slice/kubelet.service"}, []string{"kubepods"}},
		"systemd": {[]string{"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a_1b.slice/cri-containerd-4711.scope", "init.scope", "user.slice"},
			[]string{"kubepods.slice"}},
		"kind":                    {[]string{"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice", "system.slice/containerd.service"}, []string{"kubelet.slice/kubelet-kubepods.slice"}},
		"cgroup root":             {[]string{"podruntime/tenants/kubepods/besteffort"}, []string{"podruntime/tenants/kubepods"}},
		"several kubelets":        {[]string{"a/node-1/kubepods", "a/node-2/kubepods", "kubepods.slice"}, []string{"a/node-1/kubepods", "a/node-2/kubepods", "kubepods.slice"}},
		"a kubelet within a pod":  {[]string{"kubepods/burstable/pod1/c/kubelet/kubepods"}, []string{"kubepods"}},
		"containers of a machine": {[]string{"system.slice/docker-4711.scope/kubelet.slice/kubelet-kubepods.slice", "system.slice/kubepods.service"}, nil},
		"named like it":           {[]string{"kubepods-burstable.slice", "mykubepods", "kubepods2.slice"}, nil},
		"none":                    {[]string{"system.slice"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for _, group := range c.groups {
				if err := os.MkdirAll(filepath.Join(root, group), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.WriteFile(filepath.Join(root, "cgroup.procs"), nil, 0o600); err != nil {
				t.Fatal(err)
			}
			var want []string
			for _, one := range c.want {
				want = append(want, filepath.Join(root, one))
			}
			if have, err := find(root); err != nil || !slices.Equal(have, want) {
				t.Errorf("found %v, %v; want %v", have, err, want)
			}
		})
	}
}
