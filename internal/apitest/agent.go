package apitest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Namespace is that of the driver, in which agents may have Leases.
const Namespace = "ashlar-system"

// The service accounts of agents and controller.
const (
	account    = "ashlar-node"
	controller = "ashlar-controller"
)

// Agent returns the configuration of the agent of a node: with the token of a pod on that node, which has its service account and the name of the node, so that
// deploy/kubernetes/guard.yaml applies. Without a node the token is that of the service account alone.
func (s *Server) Agent(t testing.TB, node string) *rest.Config {
	t.Helper()
	s.agents.Lock()
	defer s.agents.Unlock()
	token, known := s.agents.tokens[node]
	if !known {
		var err error
		if token, err = s.podToken(context.Background(), account, node); err != nil {
			t.Fatalf("the token of the agent of %s: %v", node, err)
		}
		s.agents.tokens[node] = token
	}
	return s.Config(token)
}

// Controller returns the configuration of a new pod of the controller that calls agents. It has the rights of deploy/kubernetes/snapshot-metadata/rights.yaml
// (agents have those of agent-port/rights.yaml), but none of rbac-controller.yaml.
func (s *Server) Controller(t testing.TB) *rest.Config {
	t.Helper()
	token, err := s.podToken(context.Background(), controller, "node-of-the-controller")
	if err != nil {
		t.Fatalf("the token of a controller: %v", err)
	}
	return s.Config(token)
}

// podToken returns the token of a new pod of an account on a node; without a node that of the account alone.
func (s *Server) podToken(ctx context.Context, account, node string) (string, error) {
	kube, err := kubernetes.NewForConfig(s.Config(Admin))
	if err != nil {
		return "", err
	}
	hours := int64(10 * time.Hour / time.Second)
	spec := authenticationv1.TokenRequestSpec{ExpirationSeconds: &hours}
	if node != "" {
		if spec.BoundObjectRef, err = newPod(ctx, kube, account, node); err != nil {
			return "", err
		}
	}
	token, err := kube.CoreV1().ServiceAccounts(Namespace).CreateToken(ctx, account, &authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	return token.Status.Token, nil
}

// newPod makes a pod of an account on a node, and returns a reference to it.
func newPod(ctx context.Context, kube kubernetes.Interface, account, node string) (*authenticationv1.BoundObjectReference, error) {
	pod, err := kube.CoreV1().Pods(Namespace).Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{GenerateName: account + "-"},
		Spec: corev1.PodSpec{NodeName: node, ServiceAccountName: account, Containers: []corev1.Container{{Name: "driver", Image: "driver"}}}}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	return &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}, nil
}

// Guard applies deploy/kubernetes/rbac-node.yaml, guard.yaml, and the manifests of optional rights, for a driver with this name, and waits until guard.yaml is
// in force.
func (s *Server) Guard(ctx context.Context, driver string) error {
	client, err := dynamic.NewForConfig(s.Config(Admin))
	if err != nil {
		return err
	}
	for _, file := range []string{"namespace.yaml", "rbac-node.yaml", "guard.yaml", "startup-taint/rights.yaml", "agent-port/rights.yaml", "snapshot-metadata/rights.yaml"} {
		text, err := os.ReadFile(filepath.Join(root(), "deploy/kubernetes", file))
		if err != nil {
			return err
		}
		text = bytes.ReplaceAll(text, []byte("block.csi.ashlar.dev"), []byte(driver))
		if err := install(ctx, client, text); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	of := schema.GroupVersionResource{Version: "v1", Resource: "serviceaccounts"}
	own := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": map[string]any{"name": controller}}}
	if _, err := client.Resource(of).Namespace(Namespace).Apply(ctx, controller, own, metav1.ApplyOptions{FieldManager: "apitest", Force: true}); err != nil {
		return fmt.Errorf("ServiceAccount %s: %w", controller, err)
	}
	return errors.Join(s.guarded(ctx, driver), s.configured(ctx))
}

// install applies the objects of a manifest; namespaced ones in Namespace.
func install(ctx context.Context, client dynamic.Interface, text []byte) error {
	for decoder := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096); ; {
		o := &unstructured.Unstructured{}
		if err := decoder.Decode(&o.Object); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		resource, _ := meta.UnsafeGuessKindToResource(o.GroupVersionKind())
		var kind dynamic.ResourceInterface = client.Resource(resource)
		if slices.Contains([]string{"ServiceAccount", "Role", "RoleBinding"}, o.GetKind()) {
			kind = client.Resource(resource).Namespace(Namespace)
		}
		if _, err := kind.Apply(ctx, o.GetName(), o, metav1.ApplyOptions{FieldManager: "apitest", Force: true}); err != nil {
			return fmt.Errorf("%s %s: %w", o.GetKind(), o.GetName(), err)
		}
	}
}

// guarded waits until guard.yaml is in force: an agent whose token names no node is refused everything, and one of a node may make a pool of the driver.
func (s *Server) guarded(ctx context.Context, driver string) error {
	nobody, err := s.agentOf(nil)
	if err != nil {
		return err
	}
	probed, err := s.agentOf(map[string][]string{"authentication.kubernetes.io/node-name": {"probe"}})
	if err != nil {
		return err
	}
	refused := func(err error) bool {
		return apierrors.IsInvalid(err) && strings.Contains(err.Error(), "does not say of which node it is")
	}
	pools := ours.WithResource("pools")
	leases := schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}
	for _, probe := range []struct {
		of     dynamic.ResourceInterface
		object *unstructured.Unstructured
		want   func(err error) bool
	}{
		{nobody.Resource(ours.WithResource("volumes")), aVolume(), refused},
		{nobody.Resource(pools), object("Pool", "probe.a", "{nodeName: probe, pool: a, default: false, maxVolumes: 0}"), refused},
		{nobody.Resource(ours.WithResource("replicatedvolumes")), object("ReplicatedVolume", strings.Repeat("0", 32), "{name: a, pool: a, replicas: 2, size: 4096, legs: [\"00000000000000000000000000000000\"], numbered: 1}"), refused},
		{nobody.Resource(leases).Namespace(Namespace), object("Lease", "node.probe", "{holderIdentity: probe}"), refused},
		// The rules for a driver before would refuse this.
		{probed.Resource(pools), object("Pool", "probe.a", fmt.Sprintf("{nodeName: probe, pool: a, default: false, maxVolumes: 0, driver: %q}", driver)), func(err error) bool { return err == nil }},
	} {
		for {
			_, err := probe.of.Create(ctx, probe.object, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if probe.want(err) {
				break
			}
			if ctx.Err() != nil {
				return fmt.Errorf("guard.yaml does not come into force: %w", errors.Join(err, ctx.Err()))
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	return nil
}

var ours = schema.GroupVersion{Group: "ashlar.dev", Version: "v1alpha1"}

// object returns an object of ours, or a Lease, with a spec in YAML.
func object(kind, name, spec string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{}
	text := fmt.Sprintf(`{apiVersion: %s, kind: %s, metadata: {name: %q}, spec: %s}`, map[bool]string{true: "coordination.k8s.io/v1", false: ours.String()}[kind == "Lease"], kind, name, spec)
	if err := utilyaml.Unmarshal([]byte(text), &o.Object); err != nil {
		panic(err)
	}
	return o
}

func aVolume() *unstructured.Unstructured {
	return object("Volume", strings.Repeat("0", 32), "{nodeName: probe, pool: a, name: a, size: 4096, provisioning: '', filesystem: ''}")
}

// configured waits until the API server can ask its policies. One of them has parameters of our own kind. A server that looked for its kinds while that was not
// served, as it started or the definitions were away, does not find it, refuses each volume, and looks again every 30 seconds.
func (s *Server) configured(ctx context.Context) error {
	client, err := dynamic.NewForConfig(s.Config(Admin))
	if err != nil {
		return err
	}
	for {
		_, err := client.Resource(ours.WithResource("volumes")).Create(ctx, aVolume(), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil || !strings.Contains(err.Error(), "failed to configure ") {
			return nil // a test may have taken off the definitions
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the API server cannot ask its policies: %w", err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// agentOf returns a client with the account of agents and further claims of the token (extra). It has all rights that the policies do not refuse.
func (s *Server) agentOf(extra map[string][]string) (dynamic.Interface, error) {
	config := s.Config(Admin)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + Namespace + ":" + account, Groups: []string{"system:masters"}, Extra: extra}
	return dynamic.NewForConfig(config)
}
