package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"

	"github.com/ashlar-csi/ashlar/internal/apitest"
	"github.com/ashlar-csi/ashlar/internal/check"
	"github.com/ashlar-csi/ashlar/internal/co"
	"github.com/ashlar-csi/ashlar/internal/drivertest"
	"github.com/ashlar-csi/ashlar/internal/process"
	"github.com/ashlar-csi/ashlar/pkg/api/v1alpha1"
	"github.com/ashlar-csi/ashlar/pkg/volume"
)

// kubelet serves "kubectl exec" as a kubelet does, and returns its port. It runs what is asked of a pod on this machine.
func kubelet(t *testing.T, program func(command []string) []string) int32 {
	t.Helper()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := httpstream.Handshake(r, w, []string{"v4.channel.k8s.io"}); err != nil {
			t.Error(err)
			return
		}
		streams := make(chan httpstream.Stream, 8)
		conn := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, _ <-chan struct{}) error {
			streams <- s
			return nil
		})
		if conn == nil {
			t.Error("the API server asks for no streams")
			return
		}
		defer conn.Close()
		by := map[string]httpstream.Stream{}
		for len(by) < 3 {
			select {
			case s := <-streams:
				by[s.Headers().Get(corev1.StreamType)] = s
			case <-time.After(30 * time.Second):
				t.Errorf("streams of exec: %d", len(by))
				return
			}
		}
		if strings.Contains(r.URL.Path, "-tenant/") {
			t.Errorf("a program is run in the pod of a tenant: %s", r.URL.Path)
		}
		argv := program(r.URL.Query()["command"])
		run := exec.Command(argv[0], argv[1:]...)
		run.Stdout, run.Stderr = by[corev1.StreamTypeStdout], by[corev1.StreamTypeStderr]
		status := metav1.Status{Status: metav1.StatusSuccess}
		if err := run.Run(); err != nil {
			var exit *exec.ExitError
			errors.As(err, &exit)
			status = metav1.Status{Status: metav1.StatusFailure, Reason: "NonZeroExitCode", Message: err.Error(),
				Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: "ExitCode", Message: strconv.Itoa(exit.ExitCode())}}}}
		}
		_ = json.NewEncoder(by[corev1.StreamTypeError]).Encode(status) // if that fails, the test misses the output
		for _, s := range by {
			_ = s.Close()
		}
		<-conn.CloseChan()
	}))
	t.Cleanup(server.Close)
	_, port, err := net.SplitHostPort(server.Listener.Addr().String())
	check.OK(t, err)
	n, err := strconv.ParseInt(port, 10, 32)
	check.OK(t, err)
	return int32(n)
}

// TestOnNode: the driver on a node is asked for what only it knows: devices and mounts of a volume, and what the machine lacks. A pod and a Lease of a tenant
// are not taken for the driver's.
func TestOnNode(t *testing.T) {
	drivertest.NeedRoot(t)
	dir := drivertest.Dir(t)
	program, err := process.Build(dir)
	check.OK(t, err)
	pool := "--pool=default=file://" + dir + "/pool?reservePercent=0"
	driver, err := process.New(dir, "n1", program, pool)
	check.OK(t, err)
	t.Cleanup(driver.Close)
	check.OK(t, driver.Start())
	check.OK(t, driver.Ready(t.Context()))
	v, err := driver.Create(t.Context(), co.Request("pvc-1", "", 32<<20))
	check.OK(t, err)
	check.OK(t, v.Claim(t.Context()))
	check.OK(t, v.Stage(t.Context()))
	defer func() { check.OK(t, v.Unstage(t.Context())) }()

	e := newEnvironment(t)
	port := kubelet(t, func(command []string) []string {
		if command[0] != "/driver" {
			t.Errorf("run in the pod: %q", command)
		}
		argv := append([]string{program}, command[1:]...)
		if slices.Contains(command, "describe") {
			argv = append(argv, "--endpoint="+driver.Socket)
		}
		return argv
	})
	n := node("n1", corev1.ConditionTrue)
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "127.0.0.1"}}
	n.Status.DaemonEndpoints.KubeletEndpoint.Port = port
	e.add(n)
	e.add(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "nobody"}})
	off := false
	e.posing("a-tenant", "n1") // one sorts before the driver's namespace, one after
	e.posing("z-tenant", "n1")
	heard := metav1.NowMicro()
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "node.n1", Labels: map[string]string{v1alpha1.HeartbeatLabel: v1alpha1.HeartbeatOfAgent}},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &n.Name, RenewTime: &heard}}
	e.add(lease)
	privileged := true
	agent := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "ashlar-node-1", Labels: map[string]string{"app.kubernetes.io/name": "ashlar", "app.kubernetes.io/component": "node"}},
		Spec: corev1.PodSpec{NodeName: "n1", ServiceAccountName: "nobody", AutomountServiceAccountToken: &off, Containers: []corev1.Container{{Name: "driver", Image: "i", Args: []string{"serve", pool},
			SecurityContext: &corev1.SecurityContext{Privileged: &privileged}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	e.add(agent)
	now := metav1.NowMicro()
	e.add(&v1alpha1.Volume{ObjectMeta: metav1.ObjectMeta{Name: volume.KeyOf("pvc-1")}, Spec: v1alpha1.VolumeSpec{NodeName: "n1", Pool: "default", Name: "pvc-1", Size: 32 << 20, Filesystem: "ext4"},
		Status: v1alpha1.VolumeStatus{ObjectStatus: v1alpha1.ObjectStatus{Created: &now, Size: 32 << 20}}})

	r := run(t, apitest.Admin, "describe", "pvc-1")
	r.says(t, "Devices            /dev/", "Mounted at         "+dir, " used\n")
	if r.err != nil || strings.Contains(r.stdout, "Left out") {
		t.Errorf("%v\n%s", r.err, r.stdout)
	}
	// A volume with replicas, none of which is on n1: the driver on the node that uses it is asked.
	two, err := driver.Create(t.Context(), co.Request("pvc-2", "", 32<<20))
	check.OK(t, err)
	key := volume.KeyOf("pvc-2")
	leg := movable("pvc-2", "n2", 32*mib, func(v *v1alpha1.Volume) { v.Spec.ReplicaOf = key })
	e.add(leg)
	whole := &v1alpha1.ReplicatedVolume{ObjectMeta: metav1.ObjectMeta{Name: key}, Spec: v1alpha1.ReplicatedVolumeSpec{Name: "pvc-2", Pool: "default", Replicas: 1, Size: 32 * mib, Numbered: 1, Legs: []string{key},
		Claims: 1, Claim: &v1alpha1.Claim{Node: "n1", Mode: "mount", Generation: 1}}}
	e.add(whole)
	check.OK(t, errors.Join(two.Claim(t.Context()), two.Stage(t.Context())))
	r = run(t, apitest.Admin, "describe", leg.ID())
	r.says(t, "Devices            /dev/", "Mounted at         "+dir, "May be used on     n1")
	check.OK(t, two.Unstage(t.Context()))
	check.OK(t, errors.Join(two.Release(t.Context()), two.Delete(t.Context())))
	if r = run(t, apitest.Admin, "describe", leg.ID()); r.err != nil || strings.Contains(r.stdout, "Left out") {
		t.Errorf("it is not used yet: %v\n%s", r.err, r.stdout)
	}
	for _, args := range [][]string{{"doctor", "n1"}, {"doctor"}} {
		r = run(t, apitest.Admin, args...)
		r.says(t, "kernel", "pool default: ", "in use by a running driver")
		if r.err != nil {
			t.Error(r.err)
		}
	}
	lease.Spec.RenewTime = new(metav1.NowMicro()) // the steps before may have taken long
	check.OK(t, e.Update(t.Context(), lease))
	if r = run(t, apitest.Admin, "status"); strings.Contains(r.stdout, "AgentSilent") {
		t.Errorf("a tenant says that the agent is silent:\n%s", r.stdout)
	}
	driver.Kill()
	r = run(t, apitest.Admin, "describe", "pvc-1")
	r.says(t, "Left out: its devices and mounts: ask the driver on node n1: driver: ask the driver on "+driver.Socket)
	check.OK(t, driver.Start())
	check.OK(t, driver.Ready(t.Context()))
}

// TestExecInterrupted: an interrupt ends the wait for a program in a pod, also while the API server does not answer.
func TestExecInterrupted(t *testing.T) {
	e := newEnvironment(t)
	e.add(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "nobody"}})
	off, privileged := false, true
	e.add(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "ashlar-node-1", Labels: map[string]string{"app.kubernetes.io/name": "ashlar", "app.kubernetes.io/component": "node"}},
		Spec: corev1.PodSpec{NodeName: "n1", ServiceAccountName: "nobody", AutomountServiceAccountToken: &off, Containers: []corev1.Container{{Name: "driver", Image: "i",
			SecurityContext: &corev1.SecurityContext{Privileged: &privileged}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning}})
	ctx, interrupt := context.WithCancel(t.Context())
	ended := make(chan bool)
	c := through(t, func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, "/exec") {
			return false
		}
		interrupt()
		<-ended
		return true
	})
	defer close(ended)
	agent, err := c.agent(ctx, "n1")
	check.OK(t, err)
	begun := time.Now()
	if err := c.run(ctx, agent, io.Discard, io.Discard, "/driver", "doctor"); !errors.Is(err, context.Canceled) || time.Since(begun) > 30*time.Second {
		t.Errorf("after %s: %v", time.Since(begun), err)
	}
}

// posing makes objects that a tenant may make: a pod on a node with the labels of agents, and a Lease as of an agent that was silent for an hour.
func (e *environment) posing(tenant, on string) {
	e.Helper()
	e.add(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: tenant}})
	e.add(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: "nobody"}})
	off := false
	e.add(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: "posing", Labels: map[string]string{"app.kubernetes.io/name": "ashlar", "app.kubernetes.io/component": "node"}},
		Spec:   corev1.PodSpec{NodeName: on, ServiceAccountName: "nobody", AutomountServiceAccountToken: &off, Containers: []corev1.Container{{Name: "driver", Image: "i"}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning}})
	renewed := metav1.NewMicroTime(time.Now().Add(-time.Hour))
	e.add(&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: tenant, Name: "node." + on, Labels: map[string]string{v1alpha1.HeartbeatLabel: v1alpha1.HeartbeatOfAgent}},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &on, RenewTime: &renewed}})
}
